"""What ``qtool eval`` asks: a corpus or a text file means perplexity, any other name a zero-shot
task.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qtool.data import corpora
from qtool.eval.perplexity import SEQLEN, perplexity
from qtool.eval.results import Metric, Results, TaskResult


@dataclass(frozen=True)
class Asked:
    """One name, its text or questions at hand; ``answer`` asks a model.

    ``facts`` say what was asked: answers with equal facts are answers to the same questions. The
    batch size is none of them: it only moves the last digits.
    """

    name: str
    facts: dict[str, Any]
    answer: Callable[[PreTrainedModel], list[TaskResult]]


def evaluate(
    tasks: Iterable[str], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, **options: Any
) -> Results:
    """Results of ``tasks`` in order, for use from Python; options and errors: :func:`ask`,
    perplexity, zero_shot.
    """
    return Results(
        [result for asked in ask(tasks, tokenizer, **options) for result in asked.answer(model)]
    )


def ask(
    tasks: Iterable[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    seqlen: int = SEQLEN,
    limit: int | None = None,
    data_dir: str | Path | None = None,
    batch_size: int = 4,
) -> list[Asked]:
    """Find the text and the questions of every name; ``limit`` is windows of a perplexity,
    questions of a task.

    It needs no model: a misspelt last name costs seconds, not hours. Raises :class:`QtoolError` as
    :func:`qtool.data.corpora.load` and :func:`qtool.eval.zero_shot.load` do.
    """
    found = []
    for name in dict.fromkeys(tasks):
        if corpora.is_corpus(name):
            corpus = corpora.load(name, split=corpora.TEST, data_dir=data_dir)
            facts = {"task": corpus.name, "sha256": corpus.sha256, "seqlen": seqlen, "limit": limit}
            answer: Callable[..., list[TaskResult]] = partial(
                _perplexity,
                corpus,
                tokenizer=tokenizer,
                seqlen=seqlen,
                limit=limit,
                batch_size=batch_size,
            )
        else:
            from qtool.eval import zero_shot  # lm-eval takes seconds to import

            loaded, origin = zero_shot.load(name, tokenizer, data_dir)
            facts = {
                "task": name,
                "sha256": zero_shot.fingerprint(loaded),
                "limit": limit,
                "lm_eval": version("lm_eval"),
            }
            answer = partial(
                zero_shot.zero_shot,
                loaded,
                tokenizer=tokenizer,
                origin=origin,
                limit=limit,
                batch_size=batch_size,
            )
        found.append(Asked(name, facts, answer))
    return found


def _perplexity(
    corpus: corpora.Corpus,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    **options: Any,
) -> list[TaskResult]:
    found = perplexity(corpus.text, model, tokenizer, label=corpus.name, **options)
    details = {
        "nll": found.nll,
        "tokens": found.tokens,
        "seqlen": found.seqlen,
        "sha256": corpus.sha256,
        "window_nll": found.window_nll,
    }
    metric = Metric(found.perplexity, found.stderr, higher_is_better=False)
    return [
        TaskResult(
            corpus.name, "perplexity", corpus.origin, found.windows, {"perplexity": metric}, details
        )
    ]
