"""Zero-shot tasks through lm-eval's own API: its prompts, its scoring, its metric names.

A task is looked for in this order: ``demo_choice``, a local file (:mod:`qtool.eval.local_tasks`),
lm-eval's tasks, whose data comes from the hub or its cache. lm-eval's log below errors is dropped,
its bars need a terminal.
"""

import hashlib
import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import patch

from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qtool.data import corpora
from qtool.errors import QtoolError, suggest
from qtool.eval import demo_choice, local_tasks
from qtool.eval.deterministic import deterministic
from qtool.eval.results import Metric, TaskResult
from qtool.io import hub

# bootstrap draws for the standard error of metrics that are no mean; lm-eval's 100,000 take minutes
RESAMPLES = 1000


def available_tasks(data_dir: str | Path | None = None) -> list[str]:
    """The tasks that need no network: ``demo_choice`` and the local files."""
    return [demo_choice.NAME, *local_tasks.local_tasks(data_dir)]


def load(
    name: str, tokenizer: PreTrainedTokenizerBase, data_dir: str | Path | None = None
) -> tuple[list[Any], str]:
    """lm-eval's task objects (a group or tag is several) and their origin: a file, or ``lm-eval``.

    Raises :class:`QtoolError` for an unknown name, a malformed file, or data neither cached nor
    reachable.
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
        for task in tasks:
            for leaf in task.get_all_tasks() if hasattr(task, "get_all_tasks") else [task]:
                digest.update(f"{leaf.task_name} {leaf.VERSION}".encode())
                for document in leaf.eval_docs:
                    digest.update(json.dumps(document, default=str).encode())
    return digest.hexdigest()


def zero_shot(
    tasks: list[Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    origin: str,
    limit: int | None = None,
    batch_size: int = 4,
) -> list[TaskResult]:
    """Results of the tasks of :func:`load`, each on its first ``limit`` questions if given."""
    if limit is not None and limit < 1:
        raise QtoolError(f"limit {limit} leaves no question to ask: at least 1 is needed")
    with (
        _quiet(),
        hub.offline(),
        deterministic(model),
    ):  # its bars reach a terminal, nothing reaches a log
        found = evaluator.simple_evaluate(
            model=_LanguageModel(
                pretrained=model, tokenizer=tokenizer, batch_size=batch_size, backend="causal"
            ),
            tasks=tasks,
            limit=limit,
            bootstrap_iters=0 if limit == 1 else RESAMPLES,
            log_samples=False,
            task_manager=TaskManager(include_defaults=False),
        )
    return [_result(name, found, origin) for name in found["results"]]


class _LanguageModel(HFLM):
    """lm-eval's own, which also scores a continuation that merges with its context into no more
    tokens than that has.

    lm-eval stops at an assertion there (a tokenizer with tokens such as "into▁the▁"); the
    continuation then starts at the first token that differs from the context's. Wherever lm-eval
    has a number, it is the same number.
    """

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        head, tail = super()._encode_pair(context, continuation)
        if tail:
            return head, tail
        whole = self.tok_encode(context + continuation)
        shared = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(whole, head, strict=False))
        )
        return whole[:shared] or [self.prefix_token_id], whole[shared:]


def _result(name: str, found: dict[str, Any], origin: str) -> TaskResult:
    values = found["results"][name]  # "acc,none": 0.5, "acc_stderr,none": 0.1, "alias": ...
    better = found["higher_is_better"].get(name, {})
    metrics = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        stderr = values.get(f"{metric}_stderr,{filtered}")
        label = metric if filtered == "none" else f"{metric},{filtered}"
        metrics[label] = Metric(
            float(value),
            stderr if isinstance(stderr, float) else None,
            better.get(metric) is not False,
        )
    samples = found["n-samples"].get(name, {}).get("effective", 0)
    return TaskResult(
        name, "zero_shot", origin, samples, metrics, {"version": found["versions"].get(name)}
    )


@cache
def _index() -> TaskManager:
    return TaskManager()  # reads some 14,000 files


def _from_lm_eval(name: str, data_dir: str | Path | None) -> list[Any]:
    index = _index()
    if name not in index.all_tasks:
        here = [*corpora.SOURCES, *available_tasks(data_dir)]
        close = get_close_matches(name, [*here, *index.all_tasks], n=1)
        raise QtoolError(f"unknown task {name!r}, and no such file: {suggest(name, close or here)}")
    try:
        with hub.access():
            loaded = index.load([name])
    except Exception as error:  # whatever datasets, a task's own code or a missing package raises
        state = (
            f"{type(error).__name__}: {error}".split("\n")[0]
            if hub.reachable()
            else "no connection to the hub"
        )
        raise QtoolError(
            f"the data of task {name} is not here and cannot be downloaded ({state}): put it, as published, "
            f"at tasks/{name}.jsonl in a directory given by --data-dir or QTOOL_DATA_DIR, "
            "or evaluate it once with a connection"
        ) from error
    return [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with ExitStack() as stack:
        stack.callback(logger.setLevel, level)
        stack.enter_context(
            patch.dict(os.environ, {"DISABLE_MULTIPROC": "1"})
        )  # bootstrap in this process
        stack.enter_context(redirect_stdout(io.StringIO()))
        if not sys.stderr.isatty():
            stack.enter_context(redirect_stderr(io.StringIO()))
        for unused in (
            "get_git_commit_hash",
            "add_env_info",
        ):  # they run git, pip, lscpu, which say what they like
            stack.enter_context(patch.object(evaluator, unused, create=True))
        yield
