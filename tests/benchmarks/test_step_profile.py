"""A step's time by kernel: nothing is counted twice, and nothing is left out."""

import random
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving" / "step_profile.py"
apart = runpy.run_path(str(SCRIPT))["apart"]


def test_the_times_of_overlapping_kernels_add_up_to_the_time_that_any_ran() -> None:
    source = random.Random(0)
    starts = [source.randrange(200) for _ in range(60)]
    kernels = [(source.choice("abc"), start, start + source.randrange(1, 12)) for start in starts]
    found = apart(kernels)
    running = {moment for _, start, end in kernels for moment in range(start, end)}
    assert sum(us for _, us in found.values()) == len(running)
    assert sum(count for count, _ in found.values()) == len(kernels)


def test_a_kernel_that_waits_for_another_takes_the_time_after_it() -> None:
    found = apart([("waits", 1.0, 9.0), ("gemm", 0.0, 7.0), ("inside", 2.0, 3.0)])
    assert found == {"gemm": (1, 7.0), "waits": (1, 2.0), "inside": (1, 0.0)}
