"""Stored results: facts beside what was found, and the tables made of them."""

import json
import runpy
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qtool.bench import ceilings, gemm, kv
from qtool.bench.cuda_graphs import floor_us
from qtool.bench.stored import machine, store
from qtool.calibration.precision import tensor_cores
from qtool.errors import QtoolError
from qtool.serving.bench import Served

TABLES = Path(__file__).parents[2] / "benchmarks" / "tables.py"


def test_what_was_found_has_its_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "--json", "here"])
    store(tmp_path / "deep" / "found.json", {"rows": [1]})
    found = json.loads((tmp_path / "deep" / "found.json").read_text())
    assert found["rows"] == [1] and found["command"] == "python bench.py --json here"
    assert found["machine"] == machine() and found["date"].count("-") == 2


def test_layers_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of the column takes 2 us, torch's 6, 3 and 4 us, quantizing the input 1 us."""
    column = SimpleNamespace(
        bits=8, operations=1e15, weights=lambda n, k: [n * k], calls=lambda weights, m, n, k: [2.0]
    )
    us = {"bf16": 6.0, "fp8": 3.0, "int8": 4.0}
    monkeypatch.setattr(gemm, "MODELS", {"m": {"a": (128, 64), "b": (128, 128)}})
    monkeypatch.setattr(gemm, "COLUMNS", {"w8a8": column})
    monkeypatch.setattr(gemm, "reference_calls", lambda kind, m, n, k: [us[kind]])
    monkeypatch.setattr(gemm, "quantize_call", lambda column, m, k: 1.0)
    monkeypatch.setattr(gemm, "graph_us", lambda calls: calls[0])
    (few, row) = gemm.gemm_rows(["m"], [1, 16], ["w8a8"])
    assert (few["model"], few["m"]) == ("m", 1)
    assert row["us"] == {"w8a8": 4.0} | {f"torch {kind}": 2 * one for kind, one in us.items()}
    assert row["quantize_us"] == 2.0
    floors = [floor_us(16, n, k, 8, 1e15) for n, k in ((128, 64), (128, 128))]
    assert row["floor_us"] == {"w8a8": sum(floors)}
    *_, line = gemm.table([row]).splitlines()
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


def test_a_file_name_outside_utf_8_does_not_empty_the_stored_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench.py", "caf\udce9"])  # as Python decodes b"caf\xe9"
    path = tmp_path / "found.json"
    store(path, {"rows": [1]})
    assert json.loads(path.read_text())["command"] == "python bench.py caf?"


def test_a_head_dimension_that_no_kernel_has_is_refused_before_anything_is_measured() -> None:
    for dim in (40, 272):
        with pytest.raises(QtoolError, match="the head dimension of 16, up to 256"):
            kv.Shape.parse(f"1x64x8x32x{dim}")


def test_measuring_matmuls_leaves_the_use_of_tf32_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ceilings, "PROBE_BYTES", 1 << 25)
    nothing: Any = SimpleNamespace(entries={})
    with tensor_cores():
        ceilings.measure(nothing, tmp_path, torch.device("cpu"))
        assert torch.backends.cuda.matmul.allow_tf32
    assert not any(tmp_path.iterdir())
