"""`qtool eval` gives the numbers that lm-eval's own command line gives, to the last digit, on one local task file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from qtool.checkpoint.source import DEMO
from qtool.cli import cli

DATA = Path(__file__).parents[3] / "shared" / "data"
ITEMS = 24
TASK = """\
task: qtool_{name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{text}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""


def lm_eval(task: str, directory: Path) -> dict[str, float]:
    """What `python -m lm_eval` writes for a task defined in ``directory``, without network."""
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "hf",
        "--tasks",
        task,
        "--include_path",
        str(directory),
    ]
    command += ["--model_args", f"pretrained={DEMO},dtype=bfloat16", "--device", "cpu", "--batch_size", "8"]
    command += ["--limit", str(ITEMS), "--output_path", str(directory / "out")]
    here = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(directory / "hf"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [written] = (directory / "out").rglob("results_*.json")
    return json.loads(written.read_text())["results"][task]


@pytest.mark.data
@pytest.mark.skipif(not DATA.is_dir(), reason="needs ../shared/data")
@pytest.mark.parametrize(("name", "text"), [("piqa", "{{query}}Answer:")])  # its queries end with a newline
def test_same_numbers_as_the_command_line_of_lm_eval(name, text, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    definition = TASK.format(name=name, file=DATA / "tasks" / f"{name}.jsonl", text=text)
    (tmp_path / f"{name}.yaml").write_text(definition)
    expected = lm_eval(f"qtool_{name}", tmp_path)
    options = ["--model", "demo", "--data-dir", str(DATA), "--limit", str(ITEMS), "--json"]
    done = CliRunner().invoke(cli, ["eval", name, *options])
    assert done.exit_code == 0, done.output
    [task] = json.loads(done.stdout)["tasks"]
    assert task["samples"] == ITEMS
    for metric in ("acc", "acc_norm"):
        assert task["metrics"][metric]["value"] == expected[f"{metric},none"]
        assert task["metrics"][metric]["stderr"] == expected[f"{metric}_stderr,none"]
