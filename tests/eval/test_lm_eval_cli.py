"""`qtool eval` gives the numbers that lm-eval's own command line gives, to the last digit, on local
task files.
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

from qtool.cli import cli
from qtool.io.source import DEMO

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
    """Continuations of the demo's text, marked as WikiHow's are; the fields of the published files."""
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


def command_line(tasks: list[str], directory: Path) -> dict[str, dict[str, float]]:
    """What `python -m lm_eval` writes for tasks defined in ``directory``, without network."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", ",".join(tasks)]
    command += ["--include_path", str(directory)]
    command += [
        "--model_args",
        f"pretrained={DEMO},dtype=bfloat16",
        "--device",
        "cpu",
        "--batch_size",
        "8",
    ]
    command += ["--limit", str(ITEMS), "--output_path", str(directory / "out")]
    here = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(directory / "hf"),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [written] = (directory / "out").rglob("results_*.json")
    return json.loads(written.read_text())["results"]


def evaluated(tasks: list[str], data: Path) -> list[dict[str, Any]]:
    options = ["--model", "demo", "--data-dir", str(data), "--limit", str(ITEMS), "--json"]
    done = CliRunner().invoke(cli, ["eval", *tasks, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["tasks"]


def require_equal(task: dict[str, Any], theirs: dict[str, float]) -> None:
    assert task["samples"] == ITEMS
    for metric, own in task["metrics"].items():
        assert own["value"] == theirs[f"{metric},none"]
        assert own["stderr"] == theirs[f"{metric}_stderr,none"]


def test_hellaswag_as_published(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "tasks").mkdir()
    file = tmp_path / "tasks" / "hellaswag.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in hellaswag_rows()))
    original = Path(lm_eval.tasks.__file__).parent / "hellaswag" / "hellaswag.yaml"
    (tmp_path / "hellaswag.yaml").write_text(HELLASWAG.substitute(original=original, file=file))
    expected = command_line(["qtool_hellaswag"], tmp_path)["qtool_hellaswag"]
    [task] = evaluated(["hellaswag"], tmp_path)
    assert set(task["metrics"]) == {"acc", "acc_norm"} and 0 < expected["acc,none"] < 1
    require_equal(task, expected)


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_same_numbers_as_the_command_line_of_lm_eval(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, definition in TASKS.items():
        common = COMMON.substitute(name=name, file=DATA / "tasks" / f"{name}.jsonl")
        (tmp_path / f"{name}.yaml").write_text(common + definition)
    expected = command_line([f"qtool_{name}" for name in TASKS], tmp_path)
    found = evaluated(list(TASKS), DATA)
    assert [task["task"] for task in found] == list(TASKS)
    for task in found:
        assert set(task["metrics"]) == (
            {"acc"} if task["task"] == "winogrande" else {"acc", "acc_norm"}
        )
        require_equal(task, expected[f"qtool_{task['task']}"])
