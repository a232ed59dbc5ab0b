"""Runs functions in processes of their own: forks of the test's, which have imported all there is.

Python's start and its imports take seconds, what a test does there mostly less than one.
"""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore

#: seconds after which a process that does not end is ended
LONGEST = 900


class Ended(NamedTuple):
    """Exit code of a process, minus the number of the signal that ended it, and what it printed."""

    code: int
    output: str


def start(function: Callable[[], object], log: Path, environment: Mapping[str, str]) -> int:
    """The id of a new process that runs ``function`` and prints to ``log``."""
    sys.stdout.flush()
    sys.stderr.flush()
    if child := os.fork():
        return child
    code = 1
    try:
        signal.alarm(LONGEST)
        sys.stdout = sys.stderr = log.open("w", buffering=1)
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        os.environ |= environment
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # none of what the tests' process does when it ends


def end(process: int, log: Path) -> Ended:
    """Wait until ``process`` ends."""
    _, status = os.waitpid(process, 0)
    return Ended(os.waitstatus_to_exitcode(status), log.read_text())


def run(function: Callable[[], object], folder: Path) -> Ended:
    """Run ``function`` in a process that writes its log to ``folder``."""
    log = folder / "log"
    return end(start(function, log, {}), log)


def run_ranks(count: int, function: Callable[[], object], folder: Path) -> list[Ended]:
    """Run ``function`` on ``count`` ranks, as torchrun would start them."""
    store = TCPStore("localhost", 0, is_master=True)
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the launcher's
    }
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    processes = [
        start(function, log, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    return [end(process, log) for process, log in zip(processes, logs, strict=True)]
