"""What a comparison of two engines says: far is beyond both a thousandth of a nat and chance."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serving" / "compare.py"
compare = runpy.run_path(str(SCRIPT))


def keep(folder: Path, name: str, **task: Any) -> None:
    (folder / f"{name}.json").write_text(json.dumps({"tasks": [task]}))


@pytest.mark.parametrize(
    "apart, wrong",
    [([9e-4, 9e-4], 0), ([1.1e-3, 1.1e-3], 1), ([0.1, -0.05], 0), ([0.1, 0.09], 1)],
)
def test_far_is_more_than_a_thousandth_and_than_chance(
    apart: list[float], wrong: int, tmp_path: Path
) -> None:
    score = {"metrics": {"perplexity": {"value": 7.0}}, "engine": "vllm 0"}
    keep(tmp_path, "kv4-ours", details={"window_nll": [1.0, 2.0]}, **score)
    there = [own + more for own, more in zip([1.0, 2.0], apart, strict=True)]
    keep(tmp_path, "kv4-vllm", details={"window_nll": there}, **score)
    rows, found = compare["perplexities"](tmp_path)
    assert found == wrong and rows[0][:4] == ["`w4a8-lqq` with `kv4`", "1", "7.0000", "7.0000"]


def test_an_evaluation_without_its_other_half_is_wrong(tmp_path: Path) -> None:
    keep(tmp_path, "w8a8-vllm", details={"window_nll": [1.0, 2.0]}, engine="vllm 0")
    assert compare["perplexities"](tmp_path) == ([], 1)


def test_accuracies_are_those_of_both_engines_and_of_lm_eval(tmp_path: Path) -> None:
    for kind, value in (("vllm", 0.5), ("ours", 0.25)):
        keep(tmp_path, f"w8a8-{kind}", samples=8, metrics={"acc": {"value": value, "stderr": 0.1}})
    stored = tmp_path / "lm-eval" / "model" / "results_2026.json"
    stored.parent.mkdir(parents=True)
    numbers = {"acc,none": 0.75, "acc_stderr,none": 0.2}
    counts = {"original": 8, "effective": 8}
    stored.write_text(json.dumps({"results": {"asked": numbers}, "n-samples": {"asked": counts}}))
    assert compare["accuracies"](tmp_path) == [
        ["`qtool eval --engine vllm`", "8", "0.500 ± 0.100"],
        ["`qtool eval --device cuda`", "8", "0.250 ± 0.100"],
        ["`lm_eval --model vllm`", "8", "0.750 ± 0.200"],
    ]
