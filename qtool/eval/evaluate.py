"""Evaluates a model on tasks by their names.

A corpus or a text file means perplexity; any other name is a zero-shot task.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from qtool.data import corpora
from qtool.data.defaults import EVALUATION_SEQLEN
from qtool.errors import QtoolError, expand_home, require_count
from qtool.eval.engine import Model, engine_name
from qtool.eval.local_tasks import require_no_task
from qtool.eval.perplexity import perplexity
from qtool.eval.results import Results, TaskResult

#: characters of a text by which two tokenizers are compared before models are evaluated
BEGINNING = 10_000


@dataclass(frozen=True)
class LoadedTask:
    """A task with its text or questions loaded; ``evaluate`` returns a model's results.

    Results with equal ``facts`` come from the same questions in the same arithmetic. The batch size
    is not among the facts, since it only changes the last digits.
    """

    name: str
    facts: dict[str, Any]
    evaluate: Callable[[Model], list[TaskResult]]


class TaskKeywords(TypedDict, total=False):
    """The keywords of :func:`load_tasks`; each may be left out."""

    seqlen: int
    limit: int | None
    data_dir: str | Path | None
    batch_size: int
    deterministic: bool


def evaluate(
    tasks: Iterable[str], model: Model, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> Results:
    """Results of ``tasks`` on ``model``, in order.

    ``options`` are those of :func:`load_tasks`. The errors of ``perplexity`` and ``zero_shot`` are
    raised too.
    """
    loaded = load_tasks(tasks, tokenizer, **options)
    return Results([result for task in loaded for result in task.evaluate(model)])


def load_tasks(
    tasks: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seqlen: int = EVALUATION_SEQLEN,
    limit: int | None = None,
    data_dir: str | Path | None = None,
    batch_size: int = 8,
    deterministic: bool = False,
) -> list[LoadedTask]:
    """Load the text or the questions of all tasks.

    No model is needed, so a misspelt name is refused within seconds.

    Args:
        seqlen: tokens in a window of a perplexity.
        limit: largest number of windows of a perplexity, or of questions of a task.
        data_dir: directory with local copies of corpora and tasks.
        batch_size: windows or questions in a forward.
        deterministic: compute with the same bits on all devices; by default a model is evaluated
            as it is served.

    Raises:
        QtoolError: as :func:`qtool.data.corpora.load` and :func:`qtool.eval.zero_shot.load` do, or
            ``data_dir`` does not exist; or a task is a YAML file.
    """
    require_count("batch_size", batch_size)
    require_count("seqlen", seqlen, 2)
    if limit is not None:
        require_count("limit", limit)
    if data_dir:
        corpora.data_directory(data_dir)  # checked even if no task reads it
    found = []
    same = {"tokenizer": _fingerprint(tokenizer), "deterministic": deterministic}
    how: dict[str, Any] = {
        "tokenizer": tokenizer,
        "limit": limit,
        "batch_size": batch_size,
        "deterministic": deterministic,
    }
    names = list(dict.fromkeys(tasks))
    sharing = Counter(Path(name).name for name in names)
    for name in names:
        if Path(name).suffix in (".yaml", ".yml"):
            raise QtoolError(
                f"{name}: a YAML file is neither a text nor the name of a task; lm-eval's own"
                " command line takes it, `python -m qtool.lm_eval --include_path DIR --tasks NAME`"
            )
        if corpora.is_corpus(name):
            corpus = _corpus(name, data_dir)
            if sharing[corpus.name] > 1:  # files with the same name in several folders
                corpus = replace(corpus, name=name)
            task = _perplexity_task(name, corpus, seqlen, how)
        else:
            task = _zero_shot_task(name, data_dir, how)
        found.append(replace(task, facts=task.facts | same))
    return found


def require_same_tokens(
    tasks: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    data_dir: str | Path | None = None,
) -> None:
    """Check by the beginning of each text that two tokenizers give it the same tokens.

    Raises:
        QtoolError: they do not, so that perplexities cannot be compared; or as :func:`load_tasks`.
    """
    for name in filter(corpora.is_corpus, tasks):
        beginning = _corpus(name, data_dir).text[:BEGINNING]
        first, second = (
            tokens(beginning, verbose=False)["input_ids"] for tokens in (tokenizer, other)
        )
        if first != second:
            raise QtoolError(f"{name} cannot be compared: the two models' tokenizers differ")


def _corpus(name: str, data_dir: str | Path | None) -> corpora.Corpus:
    try:
        return corpora.load(name, split=corpora.TEST, data_dir=data_dir)
    except QtoolError:
        require_no_task(expand_home(name))
        raise


def _perplexity_task(
    name: str, corpus: corpora.Corpus, seqlen: int, how: dict[str, Any]
) -> LoadedTask:
    facts = {"task": corpus.name, "sha256": corpus.sha256, "seqlen": seqlen, "limit": how["limit"]}
    return LoadedTask(name, facts, partial(_perplexity, corpus, seqlen=seqlen, **how))


def _zero_shot_task(name: str, data_dir: str | Path | None, how: dict[str, Any]) -> LoadedTask:
    from qtool.eval import zero_shot  # lm-eval takes seconds to import

    loaded, origin = zero_shot.load(name, how["tokenizer"], data_dir)
    questions = zero_shot.fingerprint(loaded)
    facts = {
        "task": name,
        "sha256": questions,
        "limit": how["limit"],
        "lm_eval": version("lm_eval"),
    }
    ask = partial(
        zero_shot.zero_shot, loaded, origin=origin, questions=questions, label=name, **how
    )
    return LoadedTask(name, facts, ask)


def _fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of the settings that decide the ids of a text, without padding: lm-eval changes it."""
    rules: dict[str, Any] = tokenizer.get_vocab()
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        rules = json.loads(tokenizer.backend_tokenizer.to_str())
        rules |= {"padding": None, "truncation": None}
    facts = type(tokenizer).__name__, rules, tokenizer.bos_token, tokenizer.eos_token
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _perplexity(
    corpus: corpora.Corpus,
    model: Model,
    tokenizer: PreTrainedTokenizerBase,
    deterministic: bool,
    **options: Any,
) -> list[TaskResult]:
    found = perplexity(
        corpus.text, model, tokenizer, label=corpus.name, deterministic=deterministic, **options
    )
    details = {
        "nll": found.nll,
        "tokens": found.tokens,
        "seqlen": found.seqlen,
        "sha256": corpus.sha256,
        "window_nll": found.window_nll,
        "token_ids": found.token_ids,
    }
    return [
        TaskResult(
            corpus.name,
            "perplexity",
            corpus.origin,
            found.windows,
            {"perplexity": found.metric},
            details,
            deterministic,
            engine_name(model),
        )
    ]
