"""One call for ``qtool eval``: a corpus or a text file means perplexity, any other name a zero-shot task."""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qtool import corpora
from qtool.eval.perplexity import SEQLEN, perplexity
from qtool.eval.results import Metric, Results, TaskResult


def evaluate(
    tasks: Iterable[str],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seqlen: int = SEQLEN,
    limit: int | None = None,
    data_dir: str | Path | None = None,
    batch_size: int = 4,
) -> Results:
    """Results of ``tasks`` in order; ``limit`` is windows of a perplexity, questions of a zero-shot task.

    All text and tasks are found before the first forward pass: a misspelt last name costs seconds, not hours.
    Raises :class:`QtoolError` as :func:`qtool.corpora.load`, :func:`perplexity` and :mod:`qtool.eval.zero_shot` do.
    """
    runs: list[Callable[[], list[TaskResult]]] = []
    for name in dict.fromkeys(tasks):
        if corpora.is_corpus(name):
            corpus = corpora.load(name, split=corpora.TEST, data_dir=data_dir)
            runs.append(partial(_perplexity, corpus, model, tokenizer, seqlen, limit, batch_size))
        else:
            from qtool.eval import zero_shot  # lm-eval takes seconds to import

            found, origin = zero_shot.load(name, tokenizer, data_dir)
            runs.append(
                partial(zero_shot.zero_shot, found, model, tokenizer, origin=origin, limit=limit, batch_size=batch_size)
            )
    return Results([result for run in runs for result in run()])


def _perplexity(
    corpus: corpora.Corpus,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    seqlen: int,
    limit: int | None,
    batch_size: int,
) -> list[TaskResult]:
    found = perplexity(
        corpus.text, model, tokenizer, seqlen=seqlen, limit=limit, batch_size=batch_size, label=corpus.name
    )
    details = {
        "nll": found.nll,
        "tokens": found.tokens,
        "seqlen": found.seqlen,
        "sha256": corpus.sha256,
        "window_nll": found.window_nll,
    }
    metric = Metric(found.perplexity, found.stderr, higher_is_better=False)
    return [TaskResult(corpus.name, "perplexity", corpus.origin, found.windows, {"perplexity": metric}, details)]
