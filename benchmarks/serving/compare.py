"""Compares the scores of vLLM and of qtool's runtime, as a table of the docs.

    python benchmarks/serving/compare.py FOLDER FILE [--command TEXT] [--machine TEXT]

FOLDER holds JSON of ``qtool eval --json`` in pairs: ``NAME-ours.json``, and ``NAME-vllm.json`` or,
for two GPUs, ``NAME-vllm-two.json``. Perplexities are compared window by window: the exit code is 1
if they differ by more than 1e-3 nats and by more than chance (99 %) allows. The accuracies of
zero-shot tasks are in rows, with those of lm_eval's own command if ``FOLDER/lm-eval`` has its
results. FILE gets the table; the options add the command that ran all this, and the machine.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from qtool.bench.stored import machine, store

#: standard errors that a difference exceeds by chance in 1 % of cases
CHANCE = 2.6
NEAR = 1e-3
HEAD = (
    "scheme",
    "GPUs",
    "perplexity in vLLM",
    "in our runtime",
    "nats a token apart ± standard error",
)
TASKS_HEAD = "by", "questions", "accuracy ± standard error"


def result(file: Path) -> dict[str, Any]:
    """The first task of a file of ``qtool eval --json``."""
    return json.loads(file.read_text())["tasks"][0]


def label(name: str) -> str:
    """The name of a scheme, or of the cache of ``w4a8-lqq``."""
    return f"`w4a8-lqq` with `{name}`" if name.startswith("kv") else f"`{name}`"


def apart(there: dict[str, Any], here: dict[str, Any]) -> tuple[float, float]:
    """The mean difference of the windows' scores, and its error; all windows have one length."""
    windows = zip(*(task["details"]["window_nll"] for task in (there, here)), strict=True)
    found = [a - b for a, b in windows]
    return statistics.mean(found), statistics.stdev(found) / len(found) ** 0.5


def perplexities(folder: Path) -> tuple[list[list[str]], int]:
    """The table's rows, and the number of those that differ too much or cannot be read."""
    rows, wrong = [], 0
    for file in sorted(folder.glob("*-vllm*.json"), key=lambda file: file.stem):
        name, _, ranks = file.stem.partition("-vllm")
        try:
            there, here = result(file), result(file.with_name(f"{name}-ours.json"))
        except (OSError, ValueError) as error:
            print(f"{file.stem}: WRONG: {error}")
            wrong += 1
            continue
        mean, error = apart(there, here)
        far = abs(mean) > max(NEAR, CHANCE * error)
        wrong += far
        values = [f"{task['metrics']['perplexity']['value']:.4f}" for task in (there, here)]
        rows.append([label(name), "2" if ranks else "1", *values, f"{mean:+.1e} ± {error:.1e}"])
        print(*rows[-1], there["engine"], "WRONG" * far)
    return rows, wrong


def accuracies(folder: Path) -> list[list[str]]:
    """A row for each way to run the tasks."""
    rows = []
    for kind, by in (("vllm", "--engine vllm"), ("ours", "--device cuda")):
        for file in sorted(folder.glob(f"*-{kind}.json")):
            task = result(file)
            found = task["metrics"]["acc"]
            rows.append(row(f"`qtool eval {by}`", task["samples"], found["value"], found["stderr"]))
    for file in sorted(folder.glob("lm-eval/**/results_*.json")):
        stored = json.loads(file.read_text())
        for name, found in stored["results"].items():
            questions = stored["n-samples"][name]["effective"]
            numbers = found["acc,none"], found["acc_stderr,none"]
            rows.append(row("`lm_eval --model vllm`", questions, *numbers))
    return rows


def engines(folder: Path) -> list[str]:
    """The other evaluators beside qtool's runtime, with versions."""
    files = folder.glob("*-vllm*.json")
    return sorted({result(file)["engine"] for file in files if file.read_text()})


def row(by: str, questions: int, value: float, error: float) -> list[str]:
    """One of :func:`accuracies`."""
    return [by, str(questions), f"{value:.3f} ± {error:.3f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--command", help="by default this one")
    parser.add_argument("--machine", help="by default this one and the version of vLLM")
    arguments = parser.parse_args()
    files = sorted(arguments.folder.glob("*-ours.json"))
    if not files:
        sys.exit(f"compare.py: {arguments.folder} holds no NAME-ours.json")
    if "perplexity" in result(files[0])["metrics"]:
        rows, wrong = perplexities(arguments.folder)
        head = HEAD
    else:
        rows, wrong, head = accuracies(arguments.folder), 0, TASKS_HEAD
    here = machine("cuda" if torch.cuda.is_available() else "cpu")
    found: dict[str, Any] = {"machine": ", ".join([here, *engines(arguments.folder)])}
    found |= {key: text for key in ("command", "machine") if (text := getattr(arguments, key))}
    store(arguments.file, found | {"head": list(head), "rows": rows})
    print("RESULT", wrong, "wrong")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
