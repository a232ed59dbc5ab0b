"""Results of an evaluation as plain data, which JSON can hold.

In data, errors are standard errors (``stderr``) with their degrees of freedom (``freedom``). In
text, the number after ± is the half-width of the 95 % interval of Student's t.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from qtool.strict_json import strict_json


def standard_error(values: list[float]) -> float | None:
    """The standard error of the mean of ``values``.

    It is None for fewer than two values, or if one of them is not finite.
    """
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return float(torch.tensor(values, dtype=torch.float64).std() / math.sqrt(len(values)))


def batch_means(values: list[float]) -> list[float]:
    """Means of about sqrt(n) runs of the n consecutive ``values``, of at least two if n is above 1.

    Neighbouring windows of a text are alike, and the standard error over windows would be too
    small: by half or more on WikiText-2 and C4. Long runs depend less on one another.
    """
    runs = min(len(values), max(2, round(math.sqrt(len(values)))))
    parts = torch.tensor(values, dtype=torch.float64).tensor_split(runs)
    return [float(part.mean()) for part in parts]


def half_width(stderr: float | None, freedom: int) -> float | None:
    """The half-width of the 95 % interval, with Student's t of ``freedom`` degrees to 0.3 %.

    With 0 they are unknown, and it is the normal distribution's.
    """
    if stderr is None:
        return None
    r = 1 / freedom if freedom else 0.0
    return stderr * (1.96 + r * (2.372 + r * (2.822 + r * (1.667 + r * 3.885))))


@dataclass(frozen=True)
class Metric:
    """A value and its error, in the metric's own unit; accuracies are 0 to 1.

    Attributes:
        value: the mean over windows or questions, or its exponential for a perplexity.
        stderr: the standard error; None if it is unknown.
        higher_is_better: whether a higher value of the metric is better.
        freedom: degrees of freedom of ``stderr``; 0 if they are unknown.
    """

    value: float
    stderr: float | None
    higher_is_better: bool
    freedom: int = 0

    @property
    def interval(self) -> float | None:
        """The half-width of the 95 % interval."""
        return half_width(self.stderr, self.freedom)


@dataclass(frozen=True)
class TaskResult:
    """The result of one task.

    Attributes:
        task: name of the task.
        kind: ``perplexity`` or ``zero_shot``.
        origin: where the text or questions are from: a file, ``hub:...`` or ``lm-eval``.
        samples: the number of windows or questions.
        metrics: metrics by name: ``perplexity``, or lm-eval's names such as ``acc``, ``acc_norm``.
        details: for a perplexity nll (nats, summed), tokens, seqlen, sha256 of the text, window_nll
            (nats a token, one a window), token_ids (their sha256); for a zero-shot task version
            (lm-eval's), questions (their sha256), items (by metric, one number a question).
        deterministic: evaluated with the same bits on all devices, not as served
            (:mod:`qtool.eval.deterministic`).
        engine: the serving engine and version that computed the result; empty for this process.
    """

    task: str
    kind: str
    origin: str
    samples: int
    metrics: dict[str, Metric]
    details: dict[str, Any] = field(default_factory=dict)
    deterministic: bool = False
    engine: str = ""

    def items(self, metric: str) -> list[float]:
        """A number for each window or question; their mean is ``metric``, or its logarithm."""
        if self.kind == "perplexity":
            return list(self.details["window_nll"])
        return list(self.details.get("items", {}).get(metric, []))


@dataclass(frozen=True)
class Results:
    """The results of one model, in the order of the tasks."""

    tasks: list[TaskResult]

    def __str__(self) -> str:
        from qtool.eval.compare import table  # imports this module

        return table(self)

    def __iter__(self) -> Iterator[str]:
        """The names of the tasks, so that ``in`` tells whether there is a result of one."""
        return (result.task for result in self.tasks)

    def __getitem__(self, task: str) -> TaskResult:
        """The first result of ``task``.

        Raises:
            KeyError: there is no such task.
        """
        for result in self.tasks:
            if result.task == task:
                return result
        raise KeyError(task)

    def to_json(self, baseline: "Results | None" = None) -> str:
        """The results, and with ``baseline`` its results and the changes, as strict JSON.

        Every ``stderr`` is one standard error, of ``freedom`` degrees. Numbers that are infinite or
        NaN become null.

        Raises:
            QtoolError: as :func:`qtool.eval.compare.compare`.
        """
        from qtool.eval.compare import compare  # imports this module

        found = asdict(self)
        if baseline:
            found["baseline"] = asdict(baseline)["tasks"]
            found["changes"] = [asdict(delta) for delta in compare(self, baseline)]
        return strict_json(found)


def from_plain(task: Mapping[str, Any]) -> TaskResult:
    """The result from which ``asdict`` made ``task``, where JSON may have put null for a number.

    Raises:
        AttributeError: a field has another type.
        KeyError: a field is missing.
        TypeError: a field is unknown, or has another type.
    """
    own = {"metrics": _metrics(task["metrics"]), "details": _details(task["details"])}
    return TaskResult(**{**task, **own})


def _details(found: dict[str, Any]) -> dict[str, Any]:
    """``found`` with infinity in place of null, in the log-likelihoods of the text and windows."""
    if "nll" not in found:
        return found
    nll = [math.inf if value is None else value for value in (found["nll"], *found["window_nll"])]
    return found | {"nll": nll[0], "window_nll": nll[1:]}


def _metrics(found: dict[str, dict[str, Any]]) -> dict[str, Metric]:
    """The metrics; a value of null was infinite if lower is better (a perplexity), else NaN."""
    return {
        name: Metric(
            metric["value"]
            if metric["value"] is not None
            else (math.nan if metric["higher_is_better"] else math.inf),
            metric["stderr"],
            metric["higher_is_better"],
            metric.get("freedom", 0),
        )
        for name, metric in found.items()
    }
