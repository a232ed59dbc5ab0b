"""`qtool eval` scores local task files as lm-eval's own command line does, of native models too.

Log-likelihoods are compared in float32 and within a tolerance: two processes need not sum in the
same order, and of two choices that are nearly as likely either may win.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import Any

import lm_eval.tasks
import pytest
from click.testing import CliRunner

import qtool.lm_eval
from qtool import recipes
from qtool.cli import cli
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from tests.eval.test_agreement import scored

DATA = Path(__file__).parents[3] / "shared" / "data"
ITEMS = 12
COMMON = Template("""\
task: qtool_$name
dataset_path: json
dataset_kwargs: {data_files: {test: $file}}
test_split: test
output_type: multiple_choice
metadata: {version: 1.0}
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
""")
CHOICES = """\
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
doc_to_choice: "{{choices}}"
doc_to_target: gold
"""
OPTIONS = """\
doc_to_text: gold
doc_to_choice: "{{context_options}}"
doc_to_target: "{{continuation}}"
"""
#: what follows COMMON
TASKS = {
    "piqa": CHOICES + 'doc_to_text: "{{query}}Answer:"',  # its queries end with a newline
    "arc_easy": CHOICES + 'doc_to_text: "{{query}}\\nAnswer:"',
    "arc_challenge": CHOICES + 'doc_to_text: "{{query}}\\nAnswer:"',
    "winogrande": OPTIONS,
}
#: lm-eval's own HellaSwag, over a local file
HELLASWAG = Template("""\
include: $original
task: qtool_hellaswag
dataset_path: json
dataset_kwargs: {data_files: {validation: $file}}
training_split: null
""")


def hellaswag_rows() -> list[dict[str, Any]]:
    """Continuations of the demo's text, marked as WikiHow's, with the published files' fields."""
    words = (DEMO / "heldout.txt").read_text().split()
    rows: list[dict[str, Any]] = []
    for item in range(ITEMS):
        cut = [
            " ".join(words[start : start + 12]) for start in range(60 * item, 60 * item + 60, 12)
        ]
        rows.append(
            {
                "ind": item,
                "activity_label": f"[header] {words[item]} [title]",
                "ctx_a": f"[step] {cut[0]}  [title] so",
                "ctx_b": words[60 * item].upper() if item % 2 else "",
                "ctx": cut[0],
                "split": "val",
                "endings": [f"{ending} [substeps] and." for ending in cut[1:]],
                "label": str(item * 7 % 4),
            }
        )
    return rows


#: ``python -m MODULE ARGUMENTS``, with lm-eval's index of the folder FEW
START = """\
import runpy, sys
from lm_eval.tasks import manager

manager.__file__, module = sys.argv[1] + "/manager.py", sys.argv[2]
del sys.argv[1:3]
runpy.run_module(module, run_name="__main__")
"""


def command_line(
    few: Path, tasks: list[str], directory: Path, model: Path, module: str = "lm_eval"
) -> tuple[dict[str, dict[str, float]], dict[str, list[float]]]:
    """Metrics and log-likelihoods of lm-eval's command line on tasks defined in ``directory``."""
    out = directory / "out"
    command = [sys.executable, "-c", START, str(few), module]
    command += ["run", "--model", "hf", "--tasks", ",".join(tasks)]
    command += ["--include_path", str(directory), "--device", "cpu", "--batch_size", "8"]
    command += ["--model_args", f"pretrained={model},dtype=float32", "--limit", str(ITEMS)]
    command += ["--output_path", str(out), "--log_samples"]
    here = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(directory / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [written] = out.rglob("results_*.json")
    scores = {}
    for task in tasks:
        [samples] = out.rglob(f"samples_{task}_*.jsonl")
        rows = [json.loads(line) for line in samples.read_text().splitlines()]
        rows.sort(key=lambda row: row["doc_id"])
        scores[task] = [float(ll) for row in rows for ll, *_ in row["filtered_resps"]]
    return json.loads(written.read_text())["results"], scores


def evaluated(task: str, data: Path, model: str | Path) -> tuple[dict[str, Any], list[float]]:
    """The result and the log-likelihoods of ``qtool eval``."""
    options = ["--model", str(model), "--data-dir", str(data), "--limit", str(ITEMS), "--json"]
    options += ["--dtype", "float32"]
    results = []

    def run() -> None:
        done = CliRunner().invoke(cli, ["eval", task, *options])
        assert done.exit_code == 0, done.output
        results.extend(json.loads(done.stdout)["tasks"])

    scores = [ll for ll, _ in scored(run)]
    [result] = results
    return result, scores


def require_same(
    found: tuple[dict[str, Any], list[float]], metrics: dict[str, float], scores: list[float]
) -> None:
    """The same questions, choice by choice; a metric may differ by one near tie."""
    task, own = found
    assert task["samples"] == ITEMS and own == pytest.approx(scores, abs=1e-3)
    for name, metric in task["metrics"].items():
        assert metric["value"] == pytest.approx(metrics[f"{name},none"], abs=1.01 / ITEMS)


def test_hellaswag_as_published_on_a_native_checkpoint(few_tasks, tmp_path, monkeypatch):
    """Also where lm-eval's own command line reads it from the directory of local copies."""
    native = quantize(Checkpoint(DEMO), recipes.load("w4a16", "fast"), tmp_path / "native")
    (tmp_path / "tasks").mkdir()
    file = tmp_path / "tasks" / "hellaswag.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in hellaswag_rows()))
    original = Path(lm_eval.tasks.__file__).parent / "hellaswag" / "hellaswag.yaml"
    (tmp_path / "hellaswag.yaml").write_text(HELLASWAG.substitute(original=original, file=file))
    own = {"query": "one", "choices": ["two", "three"], "gold": 0}
    (tmp_path / "tasks" / "own.jsonl").write_text(json.dumps(own))
    monkeypatch.setenv("QTOOL_DATA_DIR", str(tmp_path))
    name, local = names = ["qtool_hellaswag", "hellaswag"]
    metrics, scores = command_line(
        few_tasks, [*names, "own"], tmp_path, native, module="qtool.lm_eval"
    )
    found = evaluated("hellaswag", tmp_path, native)
    assert set(found[0]["metrics"]) == {"acc", "acc_norm"} and len(scores[name]) == 4 * ITEMS
    require_same(found, metrics[name], scores[name])
    assert scores[local] == scores[name] and len(scores["own"]) == 2


def test_a_missing_directory_of_tasks_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("QTOOL_DATA_DIR", str(tmp_path / "none"))
    with pytest.raises(SystemExit, match=r"^qtool: .*none"):
        qtool.lm_eval.main()


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_same_scores_as_the_command_line_of_lm_eval(few_tasks, tmp_path):
    for name, definition in TASKS.items():
        common = COMMON.substitute(name=name, file=DATA / "tasks" / f"{name}.jsonl")
        (tmp_path / f"{name}.yaml").write_text(common + definition)
    metrics, scores = command_line(few_tasks, [f"qtool_{name}" for name in TASKS], tmp_path, DEMO)
    for name in TASKS:
        found = evaluated(name, DATA, "demo")
        assert set(found[0]["metrics"]) == (
            {"acc"} if name == "winogrande" else {"acc", "acc_norm"}
        )
        require_same(found, metrics[f"qtool_{name}"], scores[f"qtool_{name}"])
