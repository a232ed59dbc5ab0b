"""Every script under examples/ runs, at a tiny size."""

import runpy
import sys
from pathlib import Path

import pytest

from tests import forks

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, script: str, *arguments: object) -> str:
    """What ``python SCRIPT ARGUMENTS`` prints."""

    def main() -> None:
        sys.argv = [script, *map(str, arguments)]
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")

    ended = forks.run(main, folder)
    assert ended.code == 0, ended.stderr
    return ended.stdout


def test_quantize_and_generate(tmp_path: Path) -> None:
    said = run(tmp_path, "quantize_and_generate.py", "--tokens", 4)
    assert "times smaller" in said and "It was a dark night, and" in said


def test_own_method(tmp_path: Path) -> None:
    lines = run(tmp_path, "own_method.py", "--limit", 1).splitlines()
    plain, equalized = (float(line.split()[-1]) for line in lines)
    assert 0 < abs(plain - equalized) < 0.1 * plain  # another rounding of the same model


def test_one_weight(tmp_path: Path) -> None:
    said = run(tmp_path, "one_weight.py")
    assert "4.29 bits a weight" in said and "relative error of the output 0.0" in said


def test_one_weight_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "one_weight.png"
    run(tmp_path, "one_weight.py", "--plot", picture)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
