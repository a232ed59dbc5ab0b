"""Results of an evaluation as plain data, to JSON and back.

Errors are standard errors (``stderr``) wherever they are data, and the half-widths of 95 %
intervals, :data:`INTERVAL` standard errors, wherever a person reads ±.
"""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from qtool.errors import QtoolError

#: standard errors on either side that hold 95 %
INTERVAL = 1.96


def standard_error(values: list[float]) -> float | None:
    """The standard error of the mean of ``values``; None for fewer than two of them."""
    if len(values) < 2:
        return None
    return float(torch.tensor(values, dtype=torch.float64).std() / math.sqrt(len(values)))


@dataclass(frozen=True)
class Metric:
    """A value and its error, in the metric's own unit; accuracies are 0 to 1.

    Attributes:
        value: the mean over windows or questions; of a perplexity its exponential.
        stderr: the standard error; None where there is none.
        higher_is_better: of the metric.
    """

    value: float
    stderr: float | None
    higher_is_better: bool

    @property
    def interval(self) -> float | None:
        """The half-width of the 95 % interval."""
        return None if self.stderr is None else INTERVAL * self.stderr


@dataclass(frozen=True)
class TaskResult:
    """The result of one task.

    Attributes:
        task: its name.
        kind: ``perplexity`` or ``zero_shot``.
        origin: where the text or questions are from: a file, ``hub:...`` or ``lm-eval``.
        samples: the number of windows or questions.
        metrics: by name: ``perplexity``, or lm-eval's, as ``acc`` and ``acc_norm``.
        details: of a perplexity nll (nats, summed), tokens, seqlen, sha256 of the text, window_nll
            (nats a token, one a window), token_ids (their sha256); of a zero-shot task lm-eval's
            version of the task, questions (their sha256), items (by metric, one number a question).
        deterministic: evaluated with the same bits on all devices, and not as served
            (:mod:`qtool.eval.deterministic`).
        engine: the serving engine and version that computed it; empty for this process.
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
        """One number a window or question, whose mean is ``metric`` (a perplexity's logarithm)."""
        if self.kind == "perplexity":
            return list(self.details["window_nll"])
        return list(self.details.get("items", {}).get(metric, []))


@dataclass(frozen=True)
class Results:
    """The results of one model, in the order of the tasks."""

    tasks: list[TaskResult]

    def __str__(self) -> str:
        from qtool.eval.compare import table  # which reads results

        return table(self)

    def __getitem__(self, task: str) -> TaskResult:
        """The first result of ``task``.

        Raises:
            KeyError: there is none.
        """
        for result in self.tasks:
            if result.task == task:
                return result
        raise KeyError(task)

    def to_json(self) -> str:
        """Strict JSON: what is infinite of a perplexity becomes null."""
        return json.dumps(json_safe(asdict(self)), indent=1, allow_nan=False)


def from_json(text: str) -> Results:
    """The inverse of :meth:`Results.to_json`.

    Raises:
        QtoolError: the text is not the JSON of an evaluation.
    """
    try:
        tasks = json.loads(text)["tasks"]
        return Results(
            [
                TaskResult(
                    **task
                    | {"metrics": _metrics(task["metrics"]), "details": _details(task["details"])}
                )
                for task in tasks
            ]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise QtoolError(
            f"not the JSON of an evaluation: {type(error).__name__}: {error}"
        ) from None


def _details(found: dict[str, Any]) -> dict[str, Any]:
    """With what was infinite: a log-likelihood, or a window's."""
    if "nll" not in found:
        return found
    nll = [math.inf if value is None else value for value in (found["nll"], *found["window_nll"])]
    return found | {"nll": nll[0], "window_nll": nll[1:]}


def _metrics(found: dict[str, dict[str, Any]]) -> dict[str, Metric]:
    return {
        name: Metric(
            math.inf if metric["value"] is None else metric["value"],
            metric["stderr"],
            metric["higher_is_better"],
        )
        for name, metric in found.items()
    }


def json_safe(value: Any) -> Any:
    """``value`` as strict JSON takes it: None for infinite and NaN numbers, at any depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: json_safe(entry) for key, entry in value.items()}
    return [json_safe(entry) for entry in value] if isinstance(value, list) else value
