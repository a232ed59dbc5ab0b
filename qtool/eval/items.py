"""lm-eval's metrics as means over items, so that two models are compared item by item.

lm-eval keeps one value for each question and metric. If the metric is the mean of these values (an
accuracy), they are the items. A perplexity is replaced by its logarithm in nats, which is a mean
too: over questions, or over texts weighted by their words or bytes,

    log-perplexity = sum l_i / sum w_i      l_i = -log p(text i), in nats;  w_i = words or bytes

The items of such a ratio R are R + n (l_i - R w_i) / sum w. Their mean is R, and the standard error
of their mean is that of R to first order (the delta method), also for the difference of two models.
Metrics that are no mean (F1, corpus BLEU, ...) have no items, and neither have infinite ones, which
JSON cannot hold.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from qtool.eval.results import Metric, standard_error

#: names of lm-eval's perplexities, and the names of their logarithms in nats
LOGARITHMS = {
    "perplexity": "log_perplexity",
    "word_perplexity": "log_word_perplexity",
    "byte_perplexity": "log_byte_perplexity",
}
Items = dict[str, list[float]]
Aggregate = Callable[[Sequence[Any]], float]


def metrics_and_items(
    values: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], better: Mapping[str, bool]
) -> tuple[dict[str, Metric], Items]:
    """The metrics of one task, and the items of each metric that is a mean over items.

    Args:
        values: lm-eval's results: ``acc,none``: 0.5, ``acc_stderr,none``: 0.1, ``alias``: ...
        samples: lm-eval's log of each question.
        better: whether higher is better, by metric.
    """
    metrics: dict[str, Metric] = {}
    items: Items = {}
    for key, value in values.items():
        metric, _, filtered = key.partition(",")
        if not filtered or metric.endswith("_stderr"):
            continue
        logged = [
            sample[metric]
            for sample in samples
            if sample["filter"] == filtered and metric in sample
        ]
        found = _items(metric, logged)
        value, stderr = float(value), values.get(f"{metric}_stderr,{filtered}")
        stderr = stderr if isinstance(stderr, float) else None
        higher = better.get(metric) is not False
        if metric in LOGARITHMS:
            value = _mean(found) if found else _log(value)
            stderr, higher = standard_error(found), False
        label = LOGARITHMS.get(metric, metric) + ("" if filtered == "none" else f",{filtered}")
        metrics[label] = Metric(value, stderr, higher, max(0, len(logged) - 1))
        is_mean = bool(found) and math.isclose(_mean(found), value, rel_tol=1e-9, abs_tol=1e-12)
        if is_mean and math.isfinite(value):
            items[label] = found
    return metrics, items


def allow_infinite_perplexities(aggregation: dict[str, Aggregate]) -> None:
    """Let the perplexities in a task's ``aggregation`` be infinite.

    lm-eval raises OverflowError above 700 nats, which a long text reaches on a damaged model.
    """
    for metric in LOGARITHMS.keys() & aggregation.keys():
        aggregation[metric] = partial(_or_infinite, aggregation[metric])


def _or_infinite(aggregate: Aggregate, logged: Sequence[Any]) -> float:
    try:
        return aggregate(logged)
    except OverflowError:
        return math.inf


def _items(metric: str, logged: Sequence[Any]) -> list[float]:
    """One number for each question; empty if lm-eval logged something else."""
    sign = -1.0 if metric in LOGARITHMS else 1.0
    if all(isinstance(value, int | float) for value in logged):
        return [sign * value for value in logged]
    if metric in LOGARITHMS and all(isinstance(value, tuple | list) for value in logged):
        return _ratio([-ll for ll, _ in logged], [weight for _, weight in logged])
    return []


def _ratio(totals: Sequence[float], weights: Sequence[float]) -> list[float]:
    whole = math.fsum(weights)
    ratio, count = math.fsum(totals) / whole, len(weights)
    if math.isinf(ratio):
        return [ratio] * count
    return [ratio + count * (t - ratio * w) / whole for t, w in zip(totals, weights, strict=True)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _log(value: float) -> float:
    """The natural logarithm of a perplexity; infinite if lm-eval's perplexity overflowed."""
    return math.log(value) if 0 < value < math.inf else math.inf
