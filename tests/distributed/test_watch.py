"""What torchrun does not see: a rank that is there and silent, and a store that is gone."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from qtool.distributed import watch
from tests import forks


def begin() -> TCPStore:
    """A watch as rank 0 of 2, where rank 1 gives no sign of life after its first."""
    watch.BEAT = 0.1
    store = TCPStore("localhost", 0, is_master=True)
    store.set("qtool/beat/1", "7")
    store.set("qtool/place/1", "process 12 on there")
    watch.begin(store, 0, 2)
    return store


def wait(store: TCPStore) -> None:
    watch.SILENCE = 2
    time.sleep(300)


def another_fails(store: TCPStore) -> None:
    store.set("qtool/failed", "1")
    time.sleep(300)


def end(store: TCPStore) -> None:
    watch.end()
    time.sleep(1)


def fail_twice(store: TCPStore) -> None:
    print(watch.fail(), watch.fail())
    watch.leave(3)


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        (wait, 2, "rank 1 of 2 (process 12 on there) has given no sign of life"),
        (another_fails, 2, None),
        (end, 0, None),
    ],
    ids=["a silent rank is named", "who failed has told why", "the end is not waited for"],
)
def test_a_run_ends(
    then: Callable[[TCPStore], None], code: int, said: str | None, tmp_path: Path
) -> None:
    ended = forks.run(lambda: then(begin()), tmp_path)
    assert ended.code == code
    assert said in ended.stderr and "--resume" in ended.stderr if said else not ended.stderr


def meet(port: int) -> None:
    """A watch as rank 1 of 2, whose store stops answering."""
    watch.BEAT, watch.SILENCE = 0.1, 3
    store = TCPStore("localhost", port, is_master=False)
    watch.begin(store.clone(), 1, 2)
    store.set("met", "1")
    time.sleep(60)


def test_a_machine_that_is_cut_off_ends_too(tmp_path: Path) -> None:
    """The store's process is stopped: its connections stay open, as those of a lost network."""
    serve = """
from torch.distributed import TCPStore
store = TCPStore("localhost", 0, is_master=True)
store.set("qtool/beat/0", "7")
store.set("qtool/place/0", "process 12 on there")
print(store.port, flush=True)
store.get("met")
import os, signal
os.kill(os.getpid(), signal.SIGSTOP)
"""
    with subprocess.Popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True) as host:
        try:
            assert host.stdout is not None
            port = int(host.stdout.readline())
            ended = forks.run(lambda: meet(port), tmp_path)
        finally:
            host.kill()
    assert ended.code == 2
    assert "the store through which the ranks meet does not answer; go on with" in ended.stderr


def test_the_first_that_fails_is_the_one_that_tells(tmp_path: Path) -> None:
    ended = forks.run(lambda: fail_twice(begin()), tmp_path)
    assert (ended.stdout.split(), ended.code) == (["True", "False"], 3)
