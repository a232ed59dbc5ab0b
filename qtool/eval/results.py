"""What an evaluation found, as plain data that goes to JSON and back."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from qtool.errors import QtoolError


@dataclass(frozen=True)
class Metric:
    """``value`` and its standard error (None where there is none), in the metric's own unit;
    accuracies are 0 to 1.
    """

    value: float
    stderr: float | None
    higher_is_better: bool


@dataclass(frozen=True)
class TaskResult:
    """One task. ``kind`` is perplexity or zero_shot; ``origin`` is a file, ``hub:...`` or
    ``lm-eval``.

    ``samples`` counts windows or questions. ``details`` of a perplexity: nll (nats, summed),
    tokens, seqlen, sha256 of the text, window_nll (nats a token, one a window). ``details`` of a
    zero-shot task: lm-eval's version of the task.
    """

    task: str
    kind: str
    origin: str
    samples: int
    metrics: dict[str, Metric]
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Results:
    """All tasks of one model, in the order they were asked for."""

    tasks: list[TaskResult]

    def __getitem__(self, task: str) -> TaskResult:
        return next(result for result in self.tasks if result.task == task)

    def to_json(self) -> str:
        """Strict JSON: an infinite perplexity becomes null (its nll stays)."""
        return json.dumps(finite(asdict(self)), indent=1, allow_nan=False)


def from_json(text: str) -> Results:
    """The inverse of :meth:`Results.to_json`. Raises :class:`QtoolError` where the text is not one."""
    try:
        tasks = json.loads(text)["tasks"]
        return Results(
            [TaskResult(**{**task, "metrics": _metrics(task["metrics"])}) for task in tasks]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise QtoolError(
            f"not the JSON of an evaluation: {type(error).__name__}: {error}"
        ) from None


def _metrics(found: dict[str, dict[str, Any]]) -> dict[str, Metric]:
    return {
        name: Metric(
            math.inf if metric["value"] is None else metric["value"],
            metric["stderr"],
            metric["higher_is_better"],
        )
        for name, metric in found.items()
    }


def finite(value: Any) -> Any:
    """``value`` with every infinite or NaN number in it (in dicts and lists too) replaced by None:
    strict JSON.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    return [finite(entry) for entry in value] if isinstance(value, list) else value
