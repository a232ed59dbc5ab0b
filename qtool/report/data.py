"""The data of a report, gathered from the records beside a model and from measurements.

``qtool.report.build`` fills it in, :mod:`qtool.report.page` shows it. A part that was not measured
is empty.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from qtool.calibration.expert_tokens import NOTE
from qtool.eval.channel_range import ChannelRange, role
from qtool.eval.compare import Delta, delta, item_changes
from qtool.eval.kv_error import KVError
from qtool.eval.results import Metric, TaskResult
from qtool.eval.saved import SavedResult
from qtool.pipeline.summary import errors_of, noted_errors


@dataclass(frozen=True)
class Size:
    """Linears of one role and format, or all other tensors: number, weights and stored bytes."""

    role: str
    format: str
    count: int
    weights: int
    nbytes: int
    packed: bool

    @property
    def bits(self) -> float:
        return 8 * self.nbytes / self.weights if self.weights else 0.0  # a tensor may be empty


@dataclass(frozen=True)
class Check:
    """Linears that ran the same arithmetic in ``verify``: largest distance, and problems."""

    ran: str
    count: int
    error: float
    problems: list[str]


@dataclass(frozen=True)
class Quality:
    """One metric of one task, and the baseline's if it was evaluated under the same facts.

    ``rises`` holds the change of each window in nats a token.
    """

    result: TaskResult
    metric: str
    facts: Mapping[str, Any]
    baseline: Metric | None = None
    change: Delta | None = None
    rises: Sequence[float] = ()

    @property
    def value(self) -> Metric:
        return self.result.metrics[self.metric]

    @property
    def options(self) -> list[str]:
        """The options with which the task was evaluated, in words."""
        facts = {**self.facts, **self.result.details}  # the details hold the true window length
        found = [f"the first {facts['limit']} only"] if facts.get("limit") else []
        found += [f"windows of {facts['seqlen']} tokens"] if facts.get("seqlen") else []
        found += [f"KV cache {facts['kv']}"] if facts.get("kv") else []
        found += [facts["dtype"]] if facts.get("dtype") else []
        found += ["deterministic arithmetic"] if self.result.deterministic else []
        return found + ([self.result.engine] if self.result.engine else [])

    @property
    def title(self) -> str:
        """The name of the task, and the options with which it was evaluated."""
        return ", ".join((self.result.task, *self.options))


@dataclass(frozen=True)
class LayerErrors:
    """Relative errors of the quantity ``what`` by role and block.

    A block that has several linears of a role shows the largest error. The linears ``undefined``
    have none: all their weights are zeros in the baseline, and not here.
    """

    what: str
    by_role: dict[str, dict[int, float]]
    undefined: Sequence[str] = ()


@dataclass(frozen=True)
class Gain:
    """The factor by which a transform changed the error it minimizes, over all its choices."""

    method: str
    choices: int
    least: float
    median: float
    greatest: float


@dataclass(frozen=True)
class Expert:
    """An expert of a mixture: the calibration tokens that it observed, and its largest error.

    ``routed`` tokens were routed to it, ``added`` tokens were not (``min_expert_tokens``).
    ``error`` is the largest error of its linears; None if none is recorded.
    """

    block: int
    name: str
    routed: int
    added: int
    error: float | None


@dataclass(frozen=True)
class Report:
    """All data that a page shows.

    ``baseline`` is the baseline's name as the user gave it, and ``is_source`` whether its files are
    the recorded source. ``run`` has time and memory, as ``qtool.io.run_record`` wrote them.
    ``windows`` is ``(count, tokens)`` of the windows on which ranges and errors were measured.
    """

    directory: Path
    config: Mapping[str, Any]
    provenance: Mapping[str, Any]
    sizes: Sequence[Size]
    checks: Sequence[Check]
    baseline: str | None = None
    is_source: bool = True
    quality: Sequence[Quality] = ()
    errors: LayerErrors | None = None
    ranges: Sequence[ChannelRange] = ()
    kv: Mapping[int, KVError] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=dict)
    windows: tuple[int, int] = (0, 0)

    @property
    def methods(self) -> list[tuple[str, Mapping[str, Any]]]:
        """Names and options of the recipe's methods, the rounding last; empty without a record."""
        listed = self.provenance.get("recipe", {}).get("methods", [])
        return [(name, options) for step in listed for name, options in step.items()]

    @property
    def imported(self) -> Mapping[str, Any]:
        """``format`` and ``config`` of the foreign checkpoint that was imported; {} if none was."""
        found = self.provenance.get("imported from")
        return found if isinstance(found, dict) else {}

    @property
    def quantization(self) -> Mapping[str, Any]:
        return self.config["quantization_config"]


def quality(saved: Sequence[SavedResult], model: str, baseline: str) -> list[Quality]:
    """The saved results of ``model``, each with the result of ``baseline`` for the same facts.

    ``model`` and ``baseline`` are identities.
    """
    rows = []
    for own in saved:
        if own.model != model:
            continue
        # a baseline keeps its own cache
        facts = {key: fact for key, fact in own.facts.items() if key != "kv"}
        other = next((s for s in saved if s.model == baseline and s.facts == facts), None)
        bases = {task.task: task for task in other.tasks} if other else {}
        for result in own.tasks:
            base = bases.get(result.task)
            rows += [_quality(result, metric, own.facts, base) for metric in result.metrics]
    return rows


def _quality(
    result: TaskResult, metric: str, facts: Mapping[str, Any], base: TaskResult | None
) -> Quality:
    """One metric of ``result``, beside that of the baseline if this has it."""
    if base is None or metric not in base.metrics:
        return Quality(result, metric, facts)
    rises = item_changes(result, base, metric) if result.kind == "perplexity" else []
    return Quality(result, metric, facts, base.metrics[metric], delta(result, base, metric), rises)


def recorded_errors(blocks: Sequence[Mapping[str, Any]]) -> LayerErrors | None:
    """The errors that the rounding wrote into qtool.json.

    There is an error for each linear, or the loss of a distilled block.
    """
    what, noted = noted_errors(blocks)
    by_role: dict[str, dict[int, float]] = {}
    for (block, linear), error in noted.items():
        worst = by_role.setdefault(role(f"{block}.{linear}"), {})
        worst[block] = max(worst.get(block, 0.0), error)
    if by_role:
        return LayerErrors(what, by_role)
    losses = {
        index: min(curve)
        for index, notes in enumerate(blocks)
        if (curve := _losses(notes.get("distill")))
    }
    return LayerErrors("block output", {"whole block": losses}) if losses else None


def experts(blocks: Sequence[Mapping[str, Any]]) -> list[Expert]:
    """All experts whose calibration tokens are recorded, in the order of the blocks."""
    found = []
    for block, notes in enumerate(blocks):
        errors = [pair for found in errors_of(notes).values() for pair in found.items()]
        for name, tokens in notes.get(NOTE, {}).items():
            own = [error for linear, error in errors if linear.startswith(f"{name}.")]
            found.append(Expert(block, name, **tokens, error=max(own, default=None)))
    return found


def gains(blocks: Sequence[Mapping[str, Any]]) -> list[Gain]:
    """The factor by which each searching method lowered the error it minimizes."""
    ratios: dict[str, list[float]] = {}
    for notes in blocks:
        for method, note in notes.items():
            if not isinstance(note, Mapping):  # a count, or what a method from outside notes
                continue
            for choice in [note] if {"error", "loss"} & note.keys() else note.values():
                after, before = _after_before(choice)
                if before:
                    ratios.setdefault(method, []).append(after / before)
    return [Gain(method, len(r), min(r), median(r), max(r)) for method, r in ratios.items()]


def _losses(note: Any) -> list[float]:
    """The curve of losses in ``note``; empty if a method from outside noted something else."""
    curve = note.get("loss") if isinstance(note, dict) else None
    return curve if isinstance(curve, list) else []


def _after_before(choice: Any) -> tuple[float, float]:
    """The errors after and before a choice; 0 where one is not recorded.

    The error before has a name such as ``error_unsmoothed``, or is the first of a curve.
    """
    if not isinstance(choice, dict):
        return 0.0, 0.0
    if curve := _losses(choice):
        return min(curve), curve[0]
    return choice.get("error", 0.0), next(
        (v for key, v in choice.items() if key.startswith("error_")), 0.0
    )
