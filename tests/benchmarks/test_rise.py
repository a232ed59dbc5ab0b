"""The rise of perplexity and its error, which two tables of the docs have."""

import math
import runpy
from pathlib import Path

import pytest

ACCURACY = Path(__file__).parents[2] / "benchmarks" / "accuracy"


def test_a_rise_has_the_error_of_the_ratio_and_not_of_its_logarithm() -> None:
    """An error of 0.1 nats is one of 0.2 where perplexity doubles."""
    full = {"perplexity": 1.0, "window_nll": [-0.1, 0.1]}
    found = {"perplexity": 2.0, "window_nll": [math.log(2) - 0.2, math.log(2) + 0.2]}
    rise, error = runpy.run_path(str(ACCURACY / "schemes.py"))["rise_and_error"](found, full)
    assert rise == 1 and error == pytest.approx(0.2)
    assert runpy.run_path(str(ACCURACY / "peers.py"))["rise"](found, full) == "+100.00 ± 20.00 %"
