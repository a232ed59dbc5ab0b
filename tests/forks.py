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
    stdout: str
    stderr: str


def start(
    function: Callable[[], object], folder: Path, environment: Mapping[str, str] | None = None
) -> int:
    """The id of a new process that runs ``function`` and prints to files in ``folder``."""
    sys.stdout.flush()
    sys.stderr.flush()
    folder.mkdir(exist_ok=True)
    if child := os.fork():
        return child
    code = 1
    try:
        signal.alarm(LONGEST)
        for descriptor, name in enumerate(("stdout", "stderr"), 1):
            stream = (folder / name).open("w", buffering=1)
            os.dup2(stream.fileno(), descriptor)
            setattr(sys, name, stream)
        os.environ |= environment or {}
        function()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # none of what the tests' process does when it ends


def end(process: int, folder: Path) -> Ended:
    """Wait until ``process``, which prints to ``folder``, ends."""
    _, status = os.waitpid(process, 0)
    printed = ((folder / name).read_text() for name in ("stdout", "stderr"))
    return Ended(os.waitstatus_to_exitcode(status), *printed)


def run(function: Callable[[], object], folder: Path) -> Ended:
    """Run ``function`` in a process that prints to ``folder``."""
    return end(start(function, folder), folder)


def run_ranks(count: int, function: Callable[[], object], folder: Path) -> list[Ended]:
    """Run ``function`` on ``count`` ranks, as torchrun would start them."""
    store = TCPStore("localhost", 0, is_master=True)
    shared = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the store is the launcher's
    }
    folders = [folder / f"rank-{rank}" for rank in range(count)]
    processes = [
        start(function, folder, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, folder in enumerate(folders)
    ]
    return [end(process, folder) for process, folder in zip(processes, folders, strict=True)]
