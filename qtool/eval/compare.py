"""A model beside its baseline, on the same tasks: differences with their standard errors, and the
table of both.

Perplexity: the rise of log-perplexity in nats a token (on text sampled from the baseline itself it
is the KL divergence to it) and the ratio. Its standard error is that of the mean difference over
windows, the same for both. Other metrics: the difference, with the errors of both combined,
sqrt(a^2 + b^2): an upper estimate, since both models answer the same questions and mostly agree.
"""

import json
import math
from dataclasses import asdict, dataclass

from qtool.errors import QtoolError
from qtool.eval.perplexity import standard_error
from qtool.eval.results import Metric, Results, TaskResult, finite
from qtool.text_table import render

SAME = ("sha256", "seqlen", "tokens")  # what two perplexities must share to be comparable


@dataclass(frozen=True)
class Delta:
    """``change`` is log(value / baseline) in nats for a perplexity of text, value - baseline for
    anything else.
    """

    task: str
    metric: str
    value: float
    baseline: float
    change: float
    stderr: float | None
    is_log: bool

    @property
    def ratio(self) -> float:
        return self.value / self.baseline if self.baseline else math.nan


def compare(results: Results, baseline: Results) -> list[Delta]:
    """A delta for each metric of each task both have.

    Raises :class:`QtoolError` where a task was not the same for both: other text, window length or
    question count.
    """
    known = {result.task: result for result in baseline.tasks}
    return [
        _delta(result, known[result.task], metric)
        for result in results.tasks
        if result.task in known
        for metric in result.metrics
        if metric in known[result.task].metrics
    ]


def _delta(result: TaskResult, base: TaskResult, metric: str) -> Delta:
    _check_same(result, base)
    new, old = result.metrics[metric], base.metrics[metric]
    if result.kind == "perplexity":
        rises = [
            a - b
            for a, b in zip(result.details["window_nll"], base.details["window_nll"], strict=True)
        ]
        change = (result.details["nll"] - base.details["nll"]) / result.details["tokens"]
        return Delta(
            result.task, metric, new.value, old.value, change, standard_error(rises), is_log=True
        )
    stderr = (
        None if new.stderr is None or old.stderr is None else math.hypot(new.stderr, old.stderr)
    )
    return Delta(
        result.task, metric, new.value, old.value, new.value - old.value, stderr, is_log=False
    )


def _check_same(result: TaskResult, base: TaskResult) -> None:
    mine = {"samples": result.samples} | {key: result.details.get(key) for key in SAME}
    other = {"samples": base.samples} | {key: base.details.get(key) for key in SAME}
    for key, value in mine.items():
        if value != other[key]:
            raise QtoolError(
                f"{result.task} cannot be compared: {key} is {value}, the baseline's is {other[key]}"
            )


def table(results: Results, baseline: Results | None = None) -> str:
    """Plain text, one line a metric; with ``baseline``, its values and the change."""
    deltas = {(d.task, d.metric): d for d in compare(results, baseline)} if baseline else {}
    header = ["task", "metric", "value", *(["baseline", "change"] if baseline else []), "samples"]
    rows = []
    for result in results.tasks:
        for name, metric in result.metrics.items():
            row = [result.task, name, _number(metric)]
            if baseline:
                row += _against(deltas.get((result.task, name)))
            rows.append([*row, str(result.samples)])
    return render(header, rows)


def _number(metric: Metric) -> str:
    return f"{metric.value:.4f}" + ("" if metric.stderr is None else f" ± {metric.stderr:.4f}")


def _against(delta: Delta | None) -> list[str]:
    if delta is None:
        return ["-", "-"]
    error = "" if delta.stderr is None else f" ± {delta.stderr:.4f}"
    change = f"{delta.change:+.4f}{error}" + (f" nats (x{delta.ratio:.4f})" if delta.is_log else "")
    return [f"{delta.baseline:.4f}", change]


def as_json(results: Results, baseline: Results | None = None) -> str:
    """The results, and with ``baseline`` its results and the changes, as strict JSON."""
    found = json.loads(results.to_json())
    if baseline:
        found["baseline"] = json.loads(baseline.to_json())["tasks"]
        found["changes"] = [asdict(delta) for delta in compare(results, baseline)]
    return json.dumps(finite(found), indent=1, allow_nan=False)
