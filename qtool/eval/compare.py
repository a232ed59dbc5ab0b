"""Compares a model with its baseline on the same tasks, with standard errors.

A perplexity's change is the rise of log-perplexity in nats a token; on text sampled from the
baseline itself it is the KL divergence to the baseline. The change of any other metric is the
difference. If both models saw the same items (windows or questions), the standard error is that of
the mean difference over items, so that items that are hard for both do not count; windows are taken
in runs (:func:`~qtool.eval.results.batch_means`). Otherwise, or if the metric is no mean over
items, the errors of both are combined, sqrt(a^2 + b^2), and the change is marked as unpaired.
"""

import math
from dataclasses import dataclass

from qtool.errors import QtoolError
from qtool.eval.results import Metric, Results, TaskResult, batch_means, half_width, standard_error
from qtool.table import decimal, render

#: details that must be equal for two perplexities to be compared; token_ids depend on the tokenizer
SAME = ("sha256", "seqlen", "tokens", "token_ids")


@dataclass(frozen=True)
class Delta:
    """The change of one metric.

    Attributes:
        task: name of the task.
        metric: name of the metric.
        value: value of the model.
        baseline: value of the baseline.
        change: value - baseline; the rise of the log-perplexity in nats if ``is_log``.
        stderr: the standard error of ``change``; None if it is unknown.
        is_log: the metric is a perplexity, or another metric that is a logarithm.
        paired: ``stderr`` is the standard error of the differences item by item.
        freedom: degrees of freedom of ``stderr``; 0 if they are unknown.
    """

    task: str
    metric: str
    value: float
    baseline: float
    change: float
    stderr: float | None
    is_log: bool
    paired: bool
    freedom: int = 0

    @property
    def ratio(self) -> float:
        """The ratio of the perplexities if the metric is a logarithm, else of the values."""
        if self.is_log:
            return math.inf if self.change >= 700 else math.exp(self.change)
        return self.value / self.baseline if self.baseline else math.nan

    @property
    def interval(self) -> float | None:
        """The half-width of the 95 % interval of ``change``."""
        return half_width(self.stderr, self.freedom)


def compare(results: Results, baseline: Results) -> list[Delta]:
    """The change of each metric of each task that both results have.

    Raises:
        QtoolError: a task differs between the two: another text, window length or number of
            questions.
    """
    known = {result.task: result for result in baseline.tasks}
    return [
        delta(result, known[result.task], metric)
        for result in results.tasks
        if result.task in known
        for metric in result.metrics
        if metric in known[result.task].metrics
    ]


def delta(result: TaskResult, base: TaskResult, metric: str) -> Delta:
    """The change of a ``metric`` that both have.

    Raises:
        QtoolError: as :func:`compare`.
    """
    _check_same(result, base)
    new, old = result.metrics[metric], base.metrics[metric]
    is_log = result.kind == "perplexity" or metric.startswith("log_")
    change, changes = new.value - old.value, item_changes(result, base, metric)
    if result.kind == "perplexity":
        change = (result.details["nll"] - base.details["nll"]) / result.details["tokens"]
        changes = batch_means(changes)
    stderr, freedom = standard_error(changes), max(0, len(changes) - 1)
    if not changes and new.stderr is not None and old.stderr is not None:
        stderr, freedom = math.hypot(new.stderr, old.stderr), min(new.freedom, old.freedom)
    return Delta(
        result.task,
        metric,
        new.value,
        old.value,
        change,
        stderr,
        is_log,
        paired=bool(changes),
        freedom=freedom,
    )


def item_changes(result: TaskResult, base: TaskResult, metric: str) -> list[float]:
    """The change of ``metric`` item by item; empty if the two did not see the same items."""
    mine, other = result.items(metric), base.items(metric)
    same = result.details.get("questions") == base.details.get("questions")
    if not same or len(mine) != len(other):
        return []
    return [a - b for a, b in zip(mine, other, strict=True)]


def _check_same(result: TaskResult, base: TaskResult) -> None:
    mine = {"samples": result.samples} | {key: result.details.get(key) for key in SAME}
    other = {"samples": base.samples} | {key: base.details.get(key) for key in SAME}
    for key, value in mine.items():
        if key == "token_ids" and None in (value, other[key]):
            continue  # a result that was saved without them
        if value != other[key]:
            why = "; the two models' tokenizers differ" if key == "token_ids" else ""
            raise QtoolError(
                f"{result.task} cannot be compared: {key} is {value}, "
                f"the baseline's is {other[key]}{why}"
            )


def table(results: Results, baseline: Results | None = None) -> str:
    """A table in plain text, one line a metric; with ``baseline``, its values and the changes."""
    deltas = {(d.task, d.metric): d for d in compare(results, baseline)} if baseline else {}
    beside = ["baseline", "change ± 95 %"] if baseline else []
    header = ["task", "metric", "value ± 95 %", *beside, "samples"]
    rows = []
    for result in results.tasks:
        for name, metric in result.metrics.items():
            row = [result.task, name, _number(metric)]
            if baseline:
                row += _against(deltas.get((result.task, name)))
            rows.append([*row, str(result.samples)])
    return render(header, rows)


def _number(metric: Metric) -> str:
    return decimal(metric.value) + _plus_minus(metric.interval)


def _against(delta: Delta | None) -> list[str]:
    if delta is None:
        return ["-", "-"]
    change = f"{delta.change:+.4f}" + _plus_minus(delta.interval)
    change += f" nats (x{decimal(delta.ratio)})" if delta.is_log else ""
    unpaired = "" if delta.paired or delta.stderr is None else ", unpaired"
    return [decimal(delta.baseline), change + unpaired]


def _plus_minus(interval: float | None) -> str:
    return "" if interval is None else f" ± {decimal(interval)}"
