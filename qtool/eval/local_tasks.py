"""Zero-shot tasks from local files, ``DATA_DIR/tasks/NAME.jsonl``, scored by lm-eval.

The keys of a row say which form a file has: one of the three forms of mosaicml/llm-foundry's
local_data, or the rows of the data set that lm-eval's task of that name reads (HellaSwag's
``hellaswag_val.jsonl`` as published):

| keys                                | scored                                    | as lm-eval's   |
|-------------------------------------|-------------------------------------------|----------------|
| query, choices, gold                | p(choice | query): acc, acc_norm          | piqa, arc      |
| context_options, continuation, gold | p(continuation | context option): acc     | winogrande     |
| context, continuation               | continuation greedy? acc; its perplexity  | lambada_openai |
| ctx_a, ctx_b, activity_label, ...   | by lm-eval's own task                     | hellaswag, ... |

``gold`` is the index of the right choice. Rows become an in-memory data set: neither network nor
cache is touched.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtool.data import corpora
from qtool.errors import QtoolError, in_one_line, refuse_pipe

if TYPE_CHECKING:
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

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
        # with an int lm-eval scores doc_to_target after each of doc_to_choice
        "doc_to_text": "gold",
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
#: tasks whose prompts in lm-eval end with "\nAnswer:"
ENDS_WITH_ANSWER = {"piqa", "arc_easy", "arc_challenge"}
METRICS = {
    "acc": {"aggregation": "mean", "higher_is_better": True},
    "acc_norm": {"aggregation": "mean", "higher_is_better": True},
    "perplexity": {"aggregation": "perplexity", "higher_is_better": False},
}


def local_tasks(data_dir: str | Path | None) -> dict[str, Path]:
    """Name and file of each task in ``DATA_DIR/tasks`` (``data_dir``, else ``QTOOL_DATA_DIR``)."""
    if (directory := corpora.data_directory(data_dir)) is None:
        return {}
    return {path.stem: path for path in sorted((directory / "tasks").glob("*.jsonl"))}


def require_no_task(path: Path) -> None:
    """Refuse a file of questions that was named where a text is expected.

    Raises:
        QtoolError: the first row of the file ``path`` is in one of :data:`FORMS`.
    """
    try:
        row = _read(path)[0] if path.is_file() else {}
    except (QtoolError, OSError):  # a name may be longer than the system takes
        return
    if frozenset(row) in FORMS:
        raise QtoolError(
            f"{path} holds the questions of a zero-shot task, not a text: put it at "
            f"DIR/tasks/{path.stem}.jsonl and evaluate {path.stem} with --data-dir DIR"
        )


def load(name: str, path: Path, index: "Callable[[], TaskManager]") -> "ConfigurableTask":
    """The lm-eval task of a file; ``index`` finds lm-eval's own tasks.

    Raises:
        QtoolError: names the line that is in none of the forms.
    """
    rows = _read(path)
    form = FORMS.get(frozenset(rows[0]))
    if form is None:
        return _as_published(name, path, rows, index())
    for number, row in enumerate(rows, 1):
        _check(row, rows[0], form, f"{path} line {number}")
        if name in ENDS_WITH_ANSWER and "query" in row:
            row["query"] = row["query"].removesuffix("\n") + "\nAnswer:"
        if form["output_type"] == "loglikelihood":
            # lm-eval adds no delimiter in tasks of this form
            row["continuation"] = " " + row["continuation"]
    return build(name, rows, **form)


def _as_published(
    name: str, path: Path, rows: list[Row], index: "TaskManager"
) -> "ConfigurableTask":
    """lm-eval's own task ``name`` over ``rows`` in place of its data set."""
    forms = " or ".join(", ".join(sorted(keys)) for keys in FORMS)
    message = f"{path} line 1 has the keys {', '.join(sorted(rows[0]))}, expected {forms}"
    if name not in index.all_subtasks:
        raise QtoolError(message)
    for number, row in enumerate(rows, 1):
        _same_keys(row, rows[0], f"{path} line {number}")
    unused = "validation_split", "training_split", "fewshot_split"
    try:
        changed = {"task": name, **_only_test(rows), **dict.fromkeys(unused)}
        # the member of a group is the known task with the changes applied
        task = index.load([{"group": "local", "task": [changed]}])["tasks"][name]
        for document in task.eval_docs:
            task.doc_to_text(document), task.doc_to_target(document)
            if task.OUTPUT_TYPE == "multiple_choice":
                task.doc_to_choice(document)
    # a task's own code may raise anything if a field is not what it expects
    except Exception as error:
        raise QtoolError(
            f"{message}, or the fields of lm-eval's data set for {name} "
            f"({type(error).__name__}: {in_one_line(error)})"
        ) from error
    if task.config.num_fewshot and task.fewshot_cfg.samples is None:
        raise QtoolError(
            f"{name} puts {task.config.num_fewshot} examples of its training data before each "
            f"question, which {path} does not hold: remove it and evaluate once with a connection"
        )
    return task


def build(
    name: str, rows: list[Row], *, metrics: tuple[str, ...], **config: Any
) -> "ConfigurableTask":
    """An lm-eval task over ``rows``; ``config`` has lm-eval's own keys."""
    from lm_eval.api.task import ConfigurableTask

    return ConfigurableTask(
        config={
            "task": name,
            **_only_test(rows),
            "metric_list": [{"metric": metric} | METRICS[metric] for metric in metrics],
            "metadata": {"version": 1.0},
            **config,
        }
    )


def _only_test(rows: list[Row]) -> dict[str, Any]:
    """The keys of an lm-eval task whose data set has ``rows`` and no other split."""
    from datasets import Dataset

    data = {"test": Dataset.from_list(rows)}
    return {"custom_dataset": lambda **_: data, "test_split": "test"}


def _read(path: Path) -> list[Row]:
    refuse_pipe(path)
    try:
        rows = [
            json.loads(line)
            for line in path.read_text(encoding="utf-8-sig").split("\n")
            if line.strip()
        ]
        json.dumps(rows, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (OSError, ValueError, RecursionError) as error:  # also for thousands of brackets
        raise QtoolError(f"{path} is not JSON lines: {error}") from None
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise QtoolError(f"{path} is not JSON lines of objects: no task can be made of it")
    return rows


def _check(row: Row, first: Row, form: dict[str, Any], where: str) -> None:
    _same_keys(row, first, where)
    several = form.get("doc_to_choice")
    for key in row.keys() - {"gold", several}:
        if not isinstance(row[key], str) or (key == "continuation" and not row[key]):
            raise QtoolError(f"{where}: {key} is {row[key]!r}, expected a text")
    if several is None:
        return
    choices = row[several]
    if not isinstance(choices, list) or not all(isinstance(c, str) and c for c in choices):
        raise QtoolError(f"{where}: {several} is {choices!r}, expected a list of texts, none empty")
    if type(row["gold"]) is not int or not 0 <= row["gold"] < len(choices):
        raise QtoolError(
            f"{where}: gold is {row['gold']!r}, expected the index of one of the choices"
        )


def _same_keys(row: Row, first: Row, where: str) -> None:
    if row.keys() != first.keys():
        raise QtoolError(
            f"{where} has the keys {', '.join(sorted(row))}, line 1 has {', '.join(sorted(first))}"
        )
