"""Zero-shot tasks through lm-eval's own API: its prompts, its scoring, its metric names.

A task is looked up in this order: ``demo_choice``, a local file (:mod:`qtool.eval.local_tasks`),
lm-eval's tasks, whose data comes from the hub or its cache. Of lm-eval's log only errors are shown,
and its progress bars are hidden; on a terminal there is one bar for each task, with its name.
"""

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import tqdm as tqdm_module
from lm_eval import evaluator
from lm_eval.api import model as lm_eval_model
from lm_eval.api import task as lm_eval_task
from lm_eval.models import huggingface
from lm_eval.tasks import TaskManager
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from qtool import progress
from qtool.data import corpora
from qtool.errors import QtoolError, in_one_line, suggest
from qtool.eval import demo_choice, local_tasks
from qtool.eval.deterministic import arithmetic
from qtool.eval.engine import Model, engine_name
from qtool.eval.items import allow_infinite_perplexities, metrics_and_items
from qtool.eval.language_model import language_model
from qtool.eval.results import TaskResult
from qtool.io import hub

#: bootstrap samples for the error of metrics that are no mean; lm-eval's 100,000 take minutes
RESAMPLES = 1000
#: the most used of lm-eval's thousands of tasks, which are suggested first
COMMON = ["arc_challenge", "arc_easy", "boolq", "copa", "gsm8k", "hellaswag", "lambada_openai"]
COMMON += ["mmlu", "openbookqa", "piqa", "race", "sciq", "social_iqa", "truthfulqa_mc2"]
COMMON += ["wikitext", "winogrande"]


def available_tasks(data_dir: str | Path | None = None) -> list[str]:
    """The tasks that need no network: ``demo_choice`` and the local files."""
    return [demo_choice.NAME, *local_tasks.local_tasks(data_dir)]


def all_tasks(data_dir: str | Path | None) -> list[str]:
    """The names that :func:`load` knows; tasks that need no network come first.

    The others are lm-eval's tasks, groups and tags, whose data comes from the hub or its cache.
    """
    return list(dict.fromkeys([*available_tasks(data_dir), *_index().all_tasks]))


def load(
    name: str, tokenizer: PreTrainedTokenizerBase, data_dir: str | Path | None = None
) -> tuple[list[Any], str]:
    """lm-eval's task objects (several for a group or tag) and their origin: a file or ``lm-eval``.

    Raises:
        QtoolError: an unknown name, a malformed file, or data neither cached nor reachable.
    """
    with _quiet():
        if name == demo_choice.NAME:
            return [demo_choice.load(tokenizer)], "qtool/demo/heldout.txt"
        if path := local_tasks.local_tasks(data_dir).get(name):
            return [local_tasks.load(name, path, _index)], str(path)
        return _from_lm_eval(name, data_dir), "lm-eval"


def fingerprint(tasks: list[Any]) -> str:
    """sha256 of the names, versions and documents of the tasks of :func:`load`."""
    digest = hashlib.sha256()
    with _quiet():
        for task in _leaves(tasks):
            digest.update(f"{task.task_name} {task.VERSION}".encode())
            for document in task.eval_docs:
                digest.update(json.dumps(document, default=str).encode())
    return digest.hexdigest()


def _leaves(tasks: list[Any]) -> Iterator[Any]:
    """The single tasks in ``tasks``, where groups are replaced by their tasks."""
    for task in tasks:
        yield from task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task]


def zero_shot(
    tasks: list[Any],
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    *,
    origin: str,
    limit: int | None = None,
    batch_size: int = 8,
    deterministic: bool = False,
    questions: str = "",
    label: str = "zero-shot",
) -> list[TaskResult]:
    """Results of the tasks of :func:`load`, each on its first ``limit`` questions if given.

    Args:
        origin: the origin that :func:`load` returned with the tasks.
        deterministic: compute hidden states that are the same on every device, not as served.
        questions: the tasks' :func:`fingerprint`; two results with the same fingerprint are paired.
        label: name of the progress bar.
    """
    for task in _leaves(tasks):
        allow_infinite_perplexities(task.aggregation())
    with _quiet(label), hub.offline(), arithmetic(model, deterministic):
        found = evaluator.simple_evaluate(
            model=language_model(model, tokenizer, batch_size),
            tasks=tasks,
            limit=limit,
            bootstrap_iters=0 if limit == 1 else RESAMPLES,
            log_samples=True,
            task_manager=TaskManager(include_defaults=False),
        )
    results = []
    for name, values in found["results"].items():
        logged = found["samples"].get(name, [])  # a group has no samples
        better = found["higher_is_better"].get(name, {})
        metrics, items = metrics_and_items(values, logged, better)
        details = {"version": found["versions"].get(name), "questions": questions, "items": items}
        count = found["n-samples"].get(name, {}).get("effective", 0)
        how = deterministic, engine_name(model)
        results.append(TaskResult(name, "zero_shot", origin, count, metrics, details, *how))
    return results


@cache
def _index() -> TaskManager:
    return TaskManager()  # reads some 14,000 files


def _from_lm_eval(name: str, data_dir: str | Path | None) -> list[Any]:
    index = _index()
    if name not in index.all_tasks:
        likely = [*corpora.SOURCES, *available_tasks(data_dir), *COMMON]
        close = get_close_matches(name, likely, 1) or get_close_matches(name, index.all_tasks, 1)
        raise QtoolError(
            f"unknown task {name!r}, and no such file: {suggest(name, close or likely)}"
        )
    try:
        with hub.access():
            loaded = index.load([name])
    except ImportError as error:
        raise QtoolError(
            f"task {name} needs a package that is not installed: {in_one_line(error)}"
        ) from error
    except Exception as error:  # datasets and a task's own code raise anything
        state = hub.why_not(error)
        raise QtoolError(
            f"the data of task {name} is not here and cannot be downloaded ({state}): put it, as "
            f"published, at tasks/{name}.jsonl in a directory given by --data-dir or "
            "QTOOL_DATA_DIR, or evaluate it once with a connection"
        ) from error
    return [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())


@contextmanager
def _quiet(label: str | None = None) -> Iterator[None]:
    """Hide lm-eval's progress bars and log but errors; requests get a bar named ``label``."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        stack.enter_context(patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"}))  # for bootstraps
        stack.enter_context(redirect_stdout(io.StringIO()))
        if not progress.shows_bars():
            stack.enter_context(redirect_stderr(io.StringIO()))
        for module in (tqdm_module, lm_eval_model, lm_eval_task):
            stack.enter_context(patch.object(module, "tqdm", partial(_bar, None)))
        stack.enter_context(patch.object(huggingface, "tqdm", partial(_bar, label)))
        for unused in ("get_git_commit_hash", "add_env_info"):  # these run git, pip and lscpu
            stack.enter_context(patch.object(evaluator, unused, create=True))
        yield


def _bar(label: str | None, *args: Any, disable: bool = False, **options: Any) -> Any:
    """A progress bar of lm-eval with a task's ``label``; hidden without a label."""
    hidden = disable or label is None or not progress.shows_bars()
    return tqdm(
        *args, **options | {"desc": label, "unit": "request", "leave": False, "disable": hidden}
    )
