"""What GPTQ solves: the weights of one input and scheme as rows of one problem, and problems that
go together.

Legend: N output channels, K input channels, G groups.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from qtool.calibration.block import Block
from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.models.parts import LinearGroup
from qtool.schemes.base import Clip, Params, Scheme

#: bytes of problems that are solved together: as many as that holds, one in any case
TOGETHER = 2 << 30


@dataclass
class Problem:
    """Linears of one scheme and one input, rounded as one stacked weight ``[N, K]``."""

    names: list[str]
    hessian: Hessian


@dataclass
class Solution:
    """Codes and parameters of some rows of a problem; ``lost`` and ``power``, ``[n]``: of V's error
    and of W.
    """

    codes: Tensor
    params: Params
    damping: float
    lost: Tensor
    power: Tensor

    @classmethod
    def stacked(cls, parts: Sequence["Solution"], scheme: Scheme) -> "Solution":
        """The solution of all rows."""
        first = parts[0]
        params = {k: t if k in scheme.shared_params else torch.cat([p.params[k] for p in parts])
                  for k, t in first.params.items()}  # fmt: skip
        codes, lost, power = (
            torch.cat([getattr(p, name) for p in parts]) for name in ("codes", "lost", "power")
        )
        return cls(codes, params, first.damping, lost, power)


@dataclass
class Rows:
    """Rows ``[N, K]`` of a problem, float32, and the clips chosen for them."""

    scheme: Scheme
    weight: Tensor
    hessian: Hessian
    clip: Clip = 1.0
    group_clip: Clip = 1.0

    @classmethod
    def of(cls, block: Block, problem: Problem, part: slice = slice(None)) -> "Rows":
        """Those of a problem, or a part of them."""
        names, scheme = problem.names, block.schemes[problem.names[0]]
        weights = [block.weight(name).float() for name in names]
        groups = scheme.groups(weights[0]).shape[1]
        chosen = [block.clips.get(name, (1.0, 1.0)) for name in names]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        clip = stacked([channel for channel, _ in chosen], weights)[part]
        group_clip = stacked([group for _, group in chosen], weights, groups)[part]
        return cls(scheme, weight[part], problem.hessian, clip, group_clip)


@dataclass
class GptqState:
    """A problem on its way: ``order`` and ``back [K]`` of its columns, the target, what it has so
    far.
    """

    hessian: Hessian
    order: Tensor
    back: Tensor
    target: Tensor
    keep: Tensor | None
    params: Params
    damping: float
    damped: Tensor | None
    feedback: Tensor
    codes: Tensor = field(default_factory=lambda: torch.empty(0))

    def solution(self, problem: Rows) -> Solution:
        """What became of it."""
        lost = self.hessian.power(
            problem.weight - problem.scheme.dequantize(self.codes, self.params)
        )
        return Solution(
            self.codes, self.params, self.damping, lost, self.hessian.power(problem.weight)
        )


def stages(groups: Sequence[LinearGroup]) -> Iterator[list[LinearGroup]]:
    """The groups one by one, those of experts that do the same together: no expert sees another's
    output.
    """

    def doing(group: LinearGroup) -> object:
        return group.fold if group.routed else group.linears

    for _, same in groupby(groups, doing):
        yield list(same)


def alike(block: Block, names: Sequence[str]) -> Iterator[list[str]]:
    """Those of ``names`` that are to be rounded, gathered by scheme, group size and input
    permutation.
    """
    together: dict[object, list[str]] = {}
    for name in names:
        if scheme := block.schemes.get(name):
            order = block.permutations.get(name)
            key = (
                type(scheme),
                scheme.group_size,
                scheme.scale_dtype,
                order is not None and tuple(order.tolist()),
            )
            together.setdefault(key, []).append(name)
    yield from together.values()


def solved_together(block: Block, problems: Sequence[Problem]) -> Iterator[list[int]]:
    """The numbers of ``problems`` that are solved together: of one shape and scheme, as many as
    memory may hold.
    """
    alike: dict[object, list[int]] = {}
    for i, problem in enumerate(problems):
        scheme, shapes = (
            block.schemes[problem.names[0]],
            [block.weight(name).shape for name in problem.names],
        )
        kind = (
            type(scheme),
            scheme.group_size,
            scheme.scale_dtype,
            problem.hessian.d is None,
            tuple(shapes),
        )
        alike.setdefault(kind, []).append(i)
    for numbers in alike.values():
        first = problems[numbers[0]]
        rows = sum(len(block.weight(name)) for name in first.names)
        size = at_once(rows, len(first.hessian.h))
        yield from (numbers[start : start + size] for start in range(0, len(numbers), size))


def problem_bytes(n: int, k: int) -> int:
    """What a problem holds beside its weight and Hessian: damped one and feedback; target, errors,
    codes, a sweep's.
    """
    return 2 * 4 * k * k + 18 * n * k


def at_once(n: int, k: int) -> int:
    """How many problems ``[n, k]`` are solved at once."""
    return max(1, TOGETHER // problem_bytes(n, k))


def others_bytes(count: int, n: int, k: int) -> int:
    """What ``count`` problems hold beyond one that is solved: Hessians and codes, and what is
    solved together.
    """
    return (count - 1) * (4 * k * k + n * k) + (min(count, at_once(n, k)) - 1) * problem_bytes(n, k)


def row_ranges(weights: Sequence[Tensor]) -> Iterator[slice]:
    """Where each weight's rows lie in the stack of all."""
    start = 0
    for weight in weights:
        yield slice(start, start + len(weight))
        start += len(weight)


def stacked(clips: Sequence[Clip], weights: Sequence[Tensor], *tail: int) -> Tensor:
    """The clips of several linears as one ``[N, *tail]`` for the stack of their rows."""
    pairs = zip(clips, weights, strict=True)
    return torch.cat(
        [torch.as_tensor(clip, device=w.device).expand(len(w), *tail) for clip, w in pairs]
    )
