"""Stored results: facts beside what was found, and the tables made of them."""

import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from qtool.bench.gemm import Measurement, summed, table
from qtool.bench.stored import machine, store
from qtool.serving.bench import Served

TABLES = Path(__file__).parents[2] / "benchmarks" / "tables.py"


def test_what_was_found_has_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--json", "here"])
    store(tmp_path / "deep" / "found.json", {"rows": [1]})
    found = json.loads((tmp_path / "deep" / "found.json").read_text())
    assert found["rows"] == [1] and found["command"] == "python bench.py --json here"
    assert found["machine"] == machine() and found["date"].count("-") == 2


def test_layers_are_added_up() -> None:
    us = {"w8a8": 2.0, "torch bf16": 6.0, "torch fp8": 3.0, "torch int8": 4.0}
    layers = [Measurement("m", name, 16, 128, k, us, 1.0) for name, k in (("a", 64), ("b", 128))]
    (row,) = summed([*layers])
    assert row["us"] == {name: 2 * one for name, one in us.items()} and row["quantize_us"] == 2.0
    assert row["floor_us"] == {"w8a8": sum(layer.floor("w8a8") for layer in layers)}
    *_, line = table(layers).splitlines()
    assert line.startswith("| m | 16 | 0 | 4.0 | ")
    assert line.endswith(" | 12.0 | 6.0 | 8.0 | 1.50 | 2.00 | 2.0 |")


def test_runs_of_bench_serve_become_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What ``qtool bench serve --json`` prints, kept by ``tables.py --keep serving``."""
    rows = [Served("qtool w4a8-lqq", 16, 3.0, 70000.0, 100.0), Served("fp8", 16, 4, 6, 1)]
    file = tmp_path / "two GPUs.json"
    file.write_text(json.dumps([asdict(row) for row in rows]))
    tables: dict[str, Any] = runpy.run_path(str(TABLES))
    monkeypatch.setitem(tables["keep"].__globals__, "RESULTS", tmp_path / "results")
    tables["keep"]("serving", [file], "qtool bench serve", "a GPU")
    text = tables["serving"]()
    assert "**two GPUs**" in text and "| qtool w4a8-lqq | 16 | 3.00 | 70,000 |" in text
    assert "Measured by `qtool bench serve` on a GPU, " in text
