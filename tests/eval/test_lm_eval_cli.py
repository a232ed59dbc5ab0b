"""`qtool eval` gives the numbers that lm-eval's own command line gives, to the last digit, on local task files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from string import Template

import pytest
from click.testing import CliRunner

from qtool.checkpoint.source import DEMO
from qtool.cli import cli

DATA = Path(__file__).parents[3] / "shared" / "data"
ITEMS = 24
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
#: what follows COMMON. HellaSwag is not among them: its data comes from the hub only
TASKS = {
    "piqa": CHOICES + 'doc_to_text: "{{query}}Answer:"',  # its queries end with a newline
    "arc_easy": CHOICES + 'doc_to_text: "{{query}}\\nAnswer:"',
    "winogrande": OPTIONS,
}


def lm_eval(tasks: list[str], directory: Path) -> dict[str, dict[str, float]]:
    """What `python -m lm_eval` writes for tasks defined in ``directory``, without network."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--tasks", ",".join(tasks)]
    command += ["--include_path", str(directory)]
    command += ["--model_args", f"pretrained={DEMO},dtype=bfloat16", "--device", "cpu", "--batch_size", "8"]
    command += ["--limit", str(ITEMS), "--output_path", str(directory / "out")]
    here = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(directory / "hf"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [written] = (directory / "out").rglob("results_*.json")
    return json.loads(written.read_text())["results"]


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
def test_same_numbers_as_the_command_line_of_lm_eval(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name, definition in TASKS.items():
        common = COMMON.substitute(name=name, file=DATA / "tasks" / f"{name}.jsonl")
        (tmp_path / f"{name}.yaml").write_text(common + definition)
    expected = lm_eval([f"qtool_{name}" for name in TASKS], tmp_path)
    options = ["--model", "demo", "--data-dir", str(DATA), "--limit", str(ITEMS), "--json"]
    done = CliRunner().invoke(cli, ["eval", *TASKS, *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["tasks"]
    assert [task["task"] for task in found] == list(TASKS)
    for task in found:
        theirs = expected[f"qtool_{task['task']}"]
        assert task["samples"] == ITEMS
        assert set(task["metrics"]) == ({"acc"} if task["task"] == "winogrande" else {"acc", "acc_norm"})
        for metric, own in task["metrics"].items():
            assert own["value"] == theirs[f"{metric},none"]
            assert own["stderr"] == theirs[f"{metric}_stderr,none"]
