"""The docs' tables of stored results."""

import json
from pathlib import Path

import pytest

from benchmarks import tables


def test_a_sensitivity_is_in_the_order_of_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten bits and more come last."""
    points = [{"bits": bits, "measured": 1 / bits} for bits in (16.0, 4.125, 8.0)]
    found = {"uniform": dict(zip(("none", "w4a16", "w8a8"), points, strict=True)), "curve": []}
    stored = {"command": "c", "machine": "m", "date": "d", "runs": [{"found": found}]}
    (tmp_path / "sensitivity.json").write_text(json.dumps(stored))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    table = tables.sensitivity()
    assert table.index("`w4a16`") < table.index("`w8a8`") < table.index("`none`")
