"""Zero-shot tasks out of local files, ``DATA_DIR/tasks/NAME.jsonl``, as lm-eval's own tasks: lm-eval scores them.

The keys of a row say which of three forms a file has (the forms of mosaicml/llm-foundry's local_data):

| keys                               | scored                                             | as lm-eval's       |
|------------------------------------|----------------------------------------------------|--------------------|
| query, choices, gold               | p(choice | query): acc, acc_norm                   | piqa, arc, hellaswag |
| context_options, continuation, gold | p(continuation | context option): acc             | winogrande         |
| context, continuation              | continuation greedy? acc, and its perplexity       | lambada_openai     |

``gold`` is the index of the right choice. Rows become an in-memory data set: neither network nor cache is touched.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool import corpora
from qtool.errors import QtoolError

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask

Row = dict[str, Any]

FORMS: dict[frozenset[str], dict[str, Any]] = {
    frozenset({"query", "choices", "gold"}): {
        "output_type": "multiple_choice",
        "doc_to_text": "query",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metrics": ("acc", "acc_norm"),
    },
    frozenset({"context_options", "continuation", "gold"}): {
        "output_type": "multiple_choice",
        "doc_to_text": "gold",  # an int: lm-eval then scores doc_to_target after each of doc_to_choice
        "doc_to_choice": "context_options",
        "doc_to_target": "continuation",
        "metrics": ("acc",),
    },
    frozenset({"context", "continuation"}): {
        "output_type": "loglikelihood",
        "doc_to_text": "context",
        "doc_to_target": "continuation",
        "metrics": ("perplexity", "acc"),
    },
}
ENDS_WITH_ANSWER = {"piqa", "arc_easy", "arc_challenge"}  # lm-eval's prompt for them ends "\nAnswer:"
AGGREGATION = {"acc": ("mean", True), "acc_norm": ("mean", True), "perplexity": ("perplexity", False)}


def local_tasks(data_dir: str | Path | None) -> dict[str, Path]:
    """Name and file of every task in ``DATA_DIR/tasks`` (``data_dir``, else ``QTOOL_DATA_DIR``)."""
    directory = corpora.data_directory(data_dir)
    return {path.stem: path for path in sorted((directory / "tasks").glob("*.jsonl"))} if directory else {}


def load(name: str, path: Path) -> "ConfigurableTask":
    """The lm-eval task of a file. Raises :class:`QtoolError` naming the line that is not in one of the forms."""
    rows = _read(path)
    form = FORMS.get(frozenset(rows[0]))
    if form is None:
        forms = " or ".join(", ".join(sorted(keys)) for keys in FORMS)
        raise QtoolError(f"{path} line 1 has the keys {', '.join(sorted(rows[0]))}, expected {forms}")
    for number, row in enumerate(rows, 1):
        _check(row, rows[0], form, f"{path} line {number}")
        if name in ENDS_WITH_ANSWER:
            row["query"] = row["query"].removesuffix("\n") + "\nAnswer:"
        if form["output_type"] == "loglikelihood":
            row["continuation"] = " " + row["continuation"]  # lm-eval adds no delimiter to this kind
    return build(name, rows, **form)


def build(name: str, rows: list[Row], *, metrics: tuple[str, ...], **config: Any) -> "ConfigurableTask":
    """An lm-eval task over ``rows``; ``config`` takes lm-eval's own keys."""
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    metric_list = [
        {"metric": metric, "aggregation": AGGREGATION[metric][0], "higher_is_better": AGGREGATION[metric][1]}
        for metric in metrics
    ]
    data = {"test": Dataset.from_list(rows)}
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: data,
            "test_split": "test",
            "metric_list": metric_list,
            "metadata": {"version": 1.0},
            **config,
        }
    )


def _read(path: Path) -> list[Row]:
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise QtoolError(f"{path} is not JSON lines: {error}") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise QtoolError(f"{path} is not JSON lines of objects: no task can be made of it")
    return rows


def _check(row: Row, first: Row, form: dict[str, Any], where: str) -> None:
    if row.keys() != first.keys():
        raise QtoolError(f"{where} has the keys {', '.join(sorted(row))}, line 1 has {', '.join(sorted(first))}")
    if "gold" not in row:
        return
    choices = row[form["doc_to_choice"]]
    if not isinstance(choices, list) or not isinstance(row["gold"], int) or not 0 <= row["gold"] < len(choices):
        raise QtoolError(f"{where}: gold is {row['gold']!r}, expected the index of one of the choices")
