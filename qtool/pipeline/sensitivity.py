"""Chooses a scheme for each group of linears by its cost to the model, under a size limit.

A group is the linears of a block that read one input, which engines run as one. The cost of a
scheme for a group is the KL divergence of the model's output from the float model's, in nats a
token, with only that group rounded; the costs of several groups are assumed to add up. Weights are
rounded by GPTQ (:mod:`~qtool.pipeline.trial_rounding`), or to nearest if the recipe does so.
:mod:`~qtool.pipeline.allocation` makes the choice from these costs.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, prod
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from qtool import recipes
from qtool.calibration.rounding.gptq.gptq import GptqOptions
from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.models.conv1d import replace_conv1d
from qtool.models.experts import separate_experts
from qtool.models.family import Family
from qtool.pipeline.allocation import Group, Option, allocations, best_allocation
from qtool.pipeline.divergence import Probe
from qtool.pipeline.job import Job
from qtool.pipeline.options import group_size
from qtool.pipeline.trial_rounding import rounded
from qtool.progress import Progress
from qtool.recipes import Recipe
from qtool.recipes.schema import LayerRule
from qtool.table import render

#: the choice that leaves weights unquantized
SIXTEEN = "none"
#: number of points of the curve whose divergence is measured
MEASURED = 6


@dataclass(frozen=True)
class Point:
    """A point of the curve.

    Attributes:
        bits: stored bits a weight.
        predicted: the predicted divergence: the sum of the costs of single groups, nats a token.
        measured: the divergence of the model; None if it was not measured.
    """

    bits: float
    predicted: float
    measured: float | None


@dataclass(frozen=True)
class Sensitivity:
    """A recipe and its point.

    Attributes:
        recipe: the recipe that was written.
        chosen: the point of this recipe.
        curve: points from the smallest choice for all groups on, through the chosen point. No
            choice with as few bits as a point has a smaller predicted divergence.
        uniform: points of each choice for all groups.
        options: the options of each group, with the cost of each choice.
    """

    recipe: Recipe
    chosen: Point
    curve: list[Point]
    uniform: dict[str, Point]
    options: dict[str, list[Option]]

    def as_dict(self) -> dict[str, Any]:
        """What was measured, as plain data; the recipe is in its own file."""
        facts = asdict(self)
        del facts["recipe"]
        return facts

    def __str__(self) -> str:
        """The points whose divergence was measured, by bits, each with a text on what it is."""
        points: dict[Point, list[str]] = {
            point: []
            for point in (*self.curve, *self.uniform.values())
            if point.measured is not None
        }
        for choice, point in self.uniform.items():
            points[point].append(f"all {choice}")
        points[self.chosen].append("chosen")
        rows = [
            (f"{p.bits:.3f}", f"{p.predicted:.5f}", f"{p.measured:.5f}", ", ".join(points[p]))
            for p in sorted(points, key=lambda point: point.bits)
        ]
        return render(("bits a weight", "KL predicted", "measured", ""), rows)


def recipes_of(choices: Sequence[str]) -> dict[str, Recipe | None]:
    """The recipe of each choice, None for ``none``: 16 bits.

    A choice is ``w4a16``, or has a group size: ``w4a16:64``, ``w4a16:channel``.

    Raises:
        QtoolError: there are fewer than two choices, none that quantizes, an unknown scheme, or a
            scheme whose recipe mixes schemes.
    """
    found: dict[str, Recipe | None] = {}
    for choice in choices:
        scheme, _, size = choice.partition(":")
        if scheme == SIXTEEN:
            if size:
                raise QtoolError(f"--choices {choice}: {SIXTEEN} has no group size")
            found[choice] = None
            continue
        recipe = recipes.load(scheme)
        if len(recipe.layers) > 1:
            raise QtoolError(f"--choices {choice}: one scheme is expected, as w4a16 or w4a16:64")
        if size:
            recipe = recipe.with_group_size(group_size(f"--choices {choice}: group size", size))
        found[choice] = recipe
    if len(found) < 2 or not any(found.values()):
        raise QtoolError(
            f"--choices {','.join(choices)!r}: two or more are expected, with commas between, and a"
            " scheme among them, as w4a16,w8a8"
        )
    return found


class Candidates:
    """The choices for each group of ``job``'s linears: their formats, and the bits that they store.

    Args:
        groups: all groups that may be quantized.
        choices: recipes of one scheme each, by name; None means 16 bits.
    """

    def __init__(
        self, job: Job, groups: Sequence[Group], choices: Mapping[str, Recipe | None]
    ) -> None:
        self.job, self.groups, self.choices = job, groups, choices
        transforms, rounding = job.recipe.transforms, job.recipe.rounding
        self.jobs = {
            choice: Job.of(
                job.config,
                replace(recipe, transforms=transforms, rounding=rounding),
                job.source_dtype,
            )
            for choice, recipe in choices.items()
            if recipe
        }
        self.weights = sum(sum(map(prod, self._shapes(group))) for group in groups)

    def _shapes(self, group: Group) -> list[tuple[int, int]]:
        """``(N, K)`` of the linears of ``group``."""
        block, linears = group
        shapes = self.job.linears(block)
        return [shapes[linear] for linear in linears]

    def formats(self, chosen: Mapping[Group, str]) -> dict[str, LinearFormat | None]:
        """The formats of all linears of the groups in ``chosen``, by full name."""
        return {
            name: self.jobs[choice].format.of(name) if choice in self.jobs else None
            for (block, linears), choice in chosen.items()
            for name in (self.job.full(block, linear) for linear in linears)
        }

    def all_formats(self, group: Group) -> dict[str, set[LinearFormat]]:
        """The formats of each linear of ``group``, by full name, in any choice."""
        found: dict[str, set[LinearFormat]] = {}
        for choice in self.jobs:
            for name, linear_format in self.formats({group: choice}).items():
                found.setdefault(name, set()).update(filter(None, [linear_format]))
        return found

    def bits(self, group: Group, choice: str) -> int:
        """Stored bits of all weights of ``group``."""
        return 8 * sum(
            self.jobs[choice].packed_bytes(name, n, k)
            if linear_format
            else self.job.stored_dtype(f"{name}.weight").itemsize * n * k
            for (name, linear_format), (n, k) in zip(
                self.formats({group: choice}).items(), self._shapes(group), strict=True
            )
        )

    def require_budget(self, budget_bits: float) -> None:
        """Check that a budget of ``budget_bits`` a weight leaves a choice.

        Raises:
            QtoolError: the budget is below the smallest choice, or enough for unquantized weights.
        """
        least = sum(min(self.bits(g, c) for c in self.choices) for g in self.groups)
        if budget_bits * self.weights < least:
            enough = ceil(1000 * least / self.weights) / 1000
            raise QtoolError(f"--budget-bits {budget_bits}: at least {enough:.3f} are needed")
        whole = sum(self.bits(g, SIXTEEN) for g in self.groups) / self.weights
        if budget_bits >= whole and SIXTEEN in self.choices:
            raise QtoolError(
                f"--budget-bits {budget_bits}: every linear fits in {whole:.3g} bits, so none "
                f"would be quantized; pass less than {whole:.3g}"
            )

    def options(self, group: Group, probe: Probe) -> list[Option]:
        """Each choice for ``group`` with its divergence while all other groups are in float."""
        return [
            Option(
                choice, self.bits(group, choice), probe.divergence(self.formats({group: choice}))
            )
            for choice in self.choices
        ]

    def point(self, chosen: Mapping[Group, Option], probe: Probe | None) -> Point:
        """The point of the options ``chosen`` for the groups; ``probe`` measures its divergence."""
        bits = sum(option.bits for option in chosen.values()) / self.weights
        predicted = sum(option.kl for option in chosen.values())
        if probe is None:
            return Point(bits, predicted, None)
        formats = self.formats({group: option.choice for group, option in chosen.items()})
        return Point(bits, predicted, probe.divergence(formats, parked=True))


def sensitivity(
    job: Job,
    model: PreTrainedModel,
    measured: Sequence[Tensor],
    windows: Sequence[Tensor],
    choices: Sequence[str],
    budget_bits: float,
    *,
    progress: Progress | None = None,
) -> Sensitivity:
    """The recipe of ``job`` with a choice for each group of linears, under a limit.

    Args:
        measured: batches ``[B, S]`` on which the divergence is measured.
        windows: batches ``[B, S]`` whose inputs GPTQ looks at.
        choices: choices as in :func:`recipes_of`.
        budget_bits: most stored bits a weight, over all weights that may be quantized.

    Raises:
        QtoolError: the budget is below the smallest choice or enough for 16 bits everywhere, or the
            model holds linears joined.
    """
    candidates = Candidates(job, _groups(job, model), recipes_of(choices))
    candidates.require_budget(budget_bits)
    probe = Probe(model, measured)
    gptq = None
    if job.rounding.needs_data:
        gptq = job.rounding if isinstance(job.rounding, GptqOptions) else GptqOptions()
    options: dict[Group, list[Option]] = {}
    for number, group in enumerate(candidates.groups, 1):
        of_linears = candidates.all_formats(group)
        probe.rounded |= rounded(model, _inputs(job, group), of_linears, windows, gptq)
        options[group] = candidates.options(group, probe)
        if progress:
            progress(number, len(candidates.groups), {})
    chosen = best_allocation(options, budget_bits * candidates.weights)
    curve, point = _curve(candidates, options, chosen, probe)
    uniform = {
        choice: candidates.point({group: of[i] for group, of in options.items()}, probe)
        for i, choice in enumerate(candidates.choices)
    }
    formats = {group: candidates.formats({group: o.choice}) for group, o in chosen.items()}
    recipe = replace(
        job.recipe,
        scheme=f"{job.recipe.scheme}-{point.bits:.2f}",
        about=f"schemes by sensitivity: {_in_words(point)} nats a token; "
        + "; ".join(f"all {choice}: {_in_words(of)}" for choice, of in uniform.items()),
        layers=tuple(_rules(job, formats)),
        variant="custom",
        departures=(),
    )
    named = {job.full(block, ", ".join(linears)): of for (block, linears), of in options.items()}
    return Sensitivity(recipe, point, curve, uniform, named)


def _in_words(point: Point) -> str:
    return f"{point.bits:.3f} bits a weight diverge by {point.measured:.5f}"


def _curve(
    candidates: Candidates,
    options: Mapping[Group, Sequence[Option]],
    chosen: Mapping[Group, Option],
    probe: Probe,
) -> tuple[list[Point], Point]:
    """The points of all :func:`allocations` and of ``chosen``, by bits, and that of ``chosen``.

    The divergence of :data:`MEASURED` evenly spaced points and of the chosen one is measured.
    """
    path = [of for of in allocations(options) if of != chosen] + [chosen]
    path.sort(key=lambda of: sum(option.bits for option in of.values()))
    best, step = path.index(chosen), (len(path) - 1) / (MEASURED - 1)
    measured = {best, *(round(i * step) for i in range(MEASURED))}
    curve = [candidates.point(of, probe if i in measured else None) for i, of in enumerate(path)]
    return curve, curve[best]


def _groups(job: Job, model: PreTrainedModel) -> list[Group]:
    """The groups of all blocks. The routed experts of a block are one group: kernels run them so.

    Stacked experts and ``Conv1D`` in ``model`` are replaced by linears.
    """
    replace_conv1d(model)
    separate_experts(model)
    groups = []
    for block in range(job.blocks):
        family = job.block_family(block)
        groups += [(block, group.linears) for group in family.groups if not group.routed]
        if experts := tuple(n for group in family.groups if group.routed for n in group.linears):
            groups.append((block, experts))
    modules = dict(model.named_modules())
    for block, linears in groups:
        for name in (job.full(block, linear) for linear in linears):
            if not isinstance(modules.get(name), nn.Linear):
                raise QtoolError(f"{name}: no linear of the model in memory, so nothing to measure")
    return groups


def _inputs(job: Job, group: Group) -> list[list[str]]:
    """The full names of the linears of ``group``, in lists that read one input each."""
    block, linears = group
    groups = job.block_family(block).groups
    return [[job.full(block, n) for n in of.linears] for of in groups if of.linears[0] in linears]


def _rules(
    job: Job, formats: Mapping[Group, Mapping[str, LinearFormat | None]]
) -> Iterator[LayerRule]:
    """Layer rules, one for all blocks whose linears have the same format."""
    blocks: dict[tuple[tuple[str, ...], LinearFormat | None], list[str]] = {}
    for (block, linears), of in formats.items():
        for linear_format in dict.fromkeys(of.values()):
            alike = tuple(n for n in linears if of[job.full(block, n)] == linear_format)
            blocks.setdefault((alike, linear_format), []).append(str(block))
    for (linears, found), numbers in blocks.items():
        family = job.block_family(int(numbers[0]))
        within = "|".join(dict.fromkeys(_pattern(family, name) for name in linears))
        match = rf"^{re.escape(job.family.blocks)}\.({'|'.join(numbers)})\.({within})$"
        if found is None:
            yield LayerRule(match, None)
        else:
            yield LayerRule(match, found.scheme, found.group_size, found.layout)


def _pattern(family: Family, linear: str) -> str:
    """A regular expression for ``linear``; for one of a routed expert, that of all experts."""
    pattern = re.escape(linear)
    if family.group_of(linear).routed:
        return re.sub(r"(?<=\\.)\d+(?=\\.)", r"\\d+", pattern)
    return pattern
