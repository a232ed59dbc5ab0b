"""Every script under examples/ runs, at a tiny size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: object, path: Path | None = None) -> str:
    """stdout of a script."""
    root = [str(EXAMPLES.parent), *([str(path)] if path else [])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_quantize_and_generate() -> None:
    said = run(EXAMPLES / "quantize_and_generate.py", "--tokens", 4)
    assert "times smaller" in said and "It was a dark night, and" in said


def test_own_method() -> None:
    lines = run(EXAMPLES / "own_method.py", "--limit", 1).splitlines()
    plain, equalized = (float(line.split()[-1]) for line in lines)
    assert 0 < abs(plain - equalized) < 0.1 * plain  # another rounding of the same model


def test_one_weight() -> None:
    said = run(EXAMPLES / "one_weight.py")
    assert "4.29 bits a weight" in said and "relative error of the output 0.0" in said


def test_one_weight_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "one_weight.png"
    run(EXAMPLES / "one_weight.py", "--plot", picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
