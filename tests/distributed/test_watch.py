"""What torchrun does not see: a rank that is there and silent, and a store that is gone."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from qtool.distributed import watch
from tests import forks


def begin() -> TCPStore:
    """A watch as rank 0 of 2, where rank 1 gives no sign of life after its first."""
    watch.BEAT, watch.SILENCE = 0.1, 0.3
    store = TCPStore("localhost", 0, is_master=True)
    store.set("qtool/beat/1", "7")
    store.set("qtool/place/1", "process 12 on there")
    watch.begin(store, 0, 2)
    return store


def wait(store: TCPStore) -> None:
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


def test_the_first_that_fails_is_the_one_that_tells(tmp_path: Path) -> None:
    ended = forks.run(lambda: fail_twice(begin()), tmp_path)
    assert (ended.stdout.split(), ended.code) == (["True", "False"], 3)
