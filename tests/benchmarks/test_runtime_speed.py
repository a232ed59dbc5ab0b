"""The script that measures our own runtime runs, on a model of two small layers."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/serving/runtime_speed.py"


def test_runs_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speed.json"
    arguments = ["--tiny", "--device", "cpu", "--batches", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", [SCRIPT.name, *arguments])
    assert runpy.run_path(str(SCRIPT))["main"]() == 0
    found = json.loads(out.read_text())
    assert found["same"] == {"graphs": True, "dynamic up to": "3 of 3"}
    assert set(found["step B=1"]) == {"graphs", "dynamic, eager"} and "B=1" in found["bf16"]
    assert capsys.readouterr().out.splitlines()[-2].startswith("batch")
