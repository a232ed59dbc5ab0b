"""What torchrun does not see: a rank that is there and silent, and a store that is gone."""

import subprocess
import sys
from textwrap import dedent

import pytest

BEGIN = """
    import time
    from torch.distributed import TCPStore
    from qtool.distributed import watch

    watch.SILENCE = 1.0
    store = TCPStore("localhost", 0, is_master=True)
    store.set("qtool/beat/1", "7")
    store.set("qtool/place/1", "process 12 on there")
    watch.begin(store, 0, 2)
"""


@pytest.mark.parametrize(
    ("then", "code", "said"),
    [
        ("time.sleep(300)", 2, "rank 1 of 2 (process 12 on there) has given no sign of life"),
        ("store.set('qtool/failed', '1'); time.sleep(300)", 2, None),
        ("watch.end(); time.sleep(4)", 0, None),
    ],
    ids=["a silent rank is named", "who failed has told why", "the end is not waited for"],
)
def test_a_run_ends(then: str, code: int, said: str | None) -> None:
    script = dedent(BEGIN) + then
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == code
    assert said in done.stderr and "--resume" in done.stderr if said else not done.stderr


def test_the_first_that_fails_is_the_one_that_tells() -> None:
    script = dedent(BEGIN) + "print(watch.fail(), watch.fail()); watch.leave(3)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout.split(), done.returncode) == (["True", "False"], 3)
