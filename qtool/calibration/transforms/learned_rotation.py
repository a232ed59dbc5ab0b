"""An orthogonal matrix after which groups of weights, and of their inputs, have small maxima.

SpinQuant (Liu et al., 2024, arXiv 2405.16406) learns the rotation of the residual stream on the
manifold of orthogonal matrices, by the loss of the quantized model. Here that model need not run:
the step of a group is its largest magnitude over the largest code, and the squared error of
rounding goes with the step's square. For rows w of the weights that read the residual stream, each
scaled to a mean square of 1,

    minimize    mean over groups g of    (mean_g |w Q|^p)^(2/p)        p = 16

where the p-norm stands for the maximum, and each weight has the groups of its scheme. Where a group
has a zero point, its step follows from its range: half the sum of that norm of what is positive and
of what is negative takes its place. To it comes the same of the inputs of these weights where they
have no more bits than the weights. Where they have more, the axes stand for them with the weight
0.3: an outlier of the activations is a channel of the residual stream, and has to stay spread. With
G the gradient in Q, the skew-symmetric ``S = Q^T G - G^T Q`` is the direction on the manifold. Adam
turns it into a step Y, and Cayley's transform takes it: ``Q <- Q (I + Y/2)^-1 (I - Y/2)``. With A =
Y/2 skew-symmetric that is ``2 Q (I + A^T A)^-1 (I - A) - Q``: no pivots.

A rotation has ``n (n - 1) / 2`` free numbers, and what it wins falls with the number of groups over
that: rows of random numbers are served as well as those of a model.

The matrices of the value heads are learned together: the rows are those of the weight that reads
the heads' sums, and a group of their columns may lie across heads.

Legend: n order of a matrix, h matrices, M rows, K columns, of which each matrix turns K / h.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import observe
from qtool.calibration.precision import tensor_cores
from qtool.calibration.transforms import learned_rotation_triton

#: of the norm: squarings of a square
SQUARINGS = 3
POWER = 2 ** (SQUARINGS + 1)
#: of the first step, in radians of a plane; it falls to 0
RATE = 0.03
MOMENTUM, SQUARES = 0.9, 0.99
#: rows of a step, in n
BATCH = 16
#: what the axes count beside the rows; inputs count as much as rows
AXES = 0.3
#: of which inputs are taken, of all batches
TOKENS = 2048
#: a step is many small operations: it takes at least as long as so many candidates of a search
STEP_TRIES = 6
#: numbers of a step's rows that are looked at together
STEP_NUMBERS = 1 << 25


@dataclass(eq=False)
class Dense:
    """An orthogonal ``Q [n, n]``: call it on ``x [..., n]`` for ``x Q``.

    It stays on the device where it was used last.
    """

    matrix: Tensor

    @property
    def n(self) -> int:
        return self.matrix.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        return (x.double() @ self.on(x.device)).to(x.dtype)

    def on(self, device: torch.device) -> Tensor:
        """The matrix on ``device``."""
        self.matrix = self.matrix.to(device)
        return self.matrix


@dataclass(frozen=True, eq=False)
class GroupedRows:
    """Rows of a weight, or of its inputs, and in what groups they are quantized.

    Attributes:
        values: ``[M, K]``.
        group: channels of a group.
        ranges: the groups have zero points.
    """

    values: Tensor
    group: int
    ranges: bool = False


@torch.no_grad()
def learn(
    weights: Sequence[GroupedRows],
    start: Tensor,
    steps: int,
    inputs: Sequence[GroupedRows] = (),
    keeps_ones: bool = False,
) -> Tensor:
    """``Q [h, n, n]``, float64, from the orthogonal ``start [h, n, n]``.

    Args:
        steps: steps of Adam.
        inputs: inputs of the weights; if there are none, the axes take their place.
        keeps_ones: as :func:`descend` takes it.
    """
    matrices, order = start.shape[:2]
    device = weights[0].values.device
    beside, share = inputs, 1.0
    if not inputs:
        axes = torch.eye(order, device=device).repeat(1, matrices) * order**0.5
        group = gcd(min(part.group for part in weights), order)
        beside, share = [GroupedRows(axes, group)], AXES

    def ahead(q: Tensor, step: int) -> Tensor:
        with tensor_cores():
            found = gradient_of_step(weights, q, step)
            return found.add_(gradient_of_step(beside, q, step), alpha=share)

    return descend(start.to(device), steps, ahead, keeps_ones)


def gradient_of_step(parts: Sequence[GroupedRows], q: Tensor, step: int) -> Tensor:
    """The gradient ``[h, n, n]`` of the mean over the numbers of a step's rows."""
    shares = rows_of_step([len(part.values) for part in parts], q.shape[-1], step)
    alike: dict[tuple[int, bool], list[Tensor]] = {}
    for part, own in zip(parts, shares, strict=True):
        alike.setdefault((part.group, part.ranges), []).append(part.values[own])
    together = {how: torch.cat(some) for how, some in alike.items()}
    count = sum(map(len, together.values()))
    found = torch.zeros_like(q)
    for how, rows in together.items():
        found.add_(gradient(rows, q, *how), alpha=len(rows) / count)
    return found


def descend(
    start: Tensor,
    steps: int,
    gradient_of: Callable[[Tensor, int], Tensor],
    keeps_ones: bool = False,
) -> Tensor:
    """``Q [h, n, n]``, float64, from the orthogonal ``start [h, n, n]``, on its device.

    Args:
        steps: of Adam.
        gradient_of: the gradient ``[h, n, n]`` in Q of a step, by its number.
        keeps_ones: ``ones Q = ones``, as LayerNorm needs, if it is so at the start: each step Y has
            rows and columns whose sums are 0.
    """
    q = start.float()
    one = torch.eye(q.shape[-1], device=q.device)
    mean, squares = torch.zeros_like(q), torch.zeros_like(q)
    for step in range(steps):
        found = gradient_of(q, step)
        with tensor_cores():
            ahead = q.mT @ found
        skew = ahead - ahead.mT
        mean.lerp_(skew, 1 - MOMENTUM)
        squares.lerp_(skew.square(), 1 - SQUARES)
        scale = (squares / (1 - SQUARES ** (step + 1))).sqrt_().clamp_(min=1e-20)
        half = mean / scale * (RATE * (1 - step / steps) / (1 - MOMENTUM ** (step + 1)) / 2)
        if keeps_ones:  # of the skew-symmetric, -1 times the means of the rows are the columns'
            means = half.mean(-1, keepdim=True)
            half = half - means + means.mT
        # positive definite, so that a GPU need not be waited for
        factor, _ = torch.linalg.cholesky_ex(half.mT @ half + one)
        # of small matrices 3 times as fast on a GPU as cholesky_solve
        inner = solve_triangular(factor, one - half, upper=False)
        q = 2 * q @ solve_triangular(factor.mT, inner, upper=True) - q
    q = q.double()
    for _ in range(4):  # Newton's iteration to the nearest orthogonal matrix
        q = 1.5 * q - 0.5 * q @ (q.mT @ q)
    return q


def rows_of_step(sizes: Sequence[int], order: int, step: int) -> list[slice]:
    """About ``BATCH n`` rows, of each part of these sizes its share; all rows in turn.

    Every n-th row, with an odd n: the rows of a head are a power of two.
    """
    turns = -(-sum(sizes) // (BATCH * order))
    n = turns + 1 - turns % 2
    return [slice((step + number) % n, None, n) for number in range(len(sizes))]


def step_flops(order: int, matrices: int = 1, columns: int = 0) -> float:
    """Operations of a step: products with its rows, twice, and as if they were such the rest.

    The rest (axes, powers, a solve by factorization) are fewer and slower ones. Products with
    inputs come on top of it. ``columns``: K; 0: the order.
    """
    return (4 * BATCH * (columns or order) + 100 * matrices * order) * float(order) ** 2


def gradient(rows: Tensor, q: Tensor, group: int, ranges: bool = False) -> Tensor:
    """The gradient ``[h, n, n]`` of the mean over the groups of ``rows [M, K]``, turned by q.

    ``ranges``: the groups have zero points.
    """
    found = torch.zeros_like(q)
    for some in rows.split(max(1, STEP_NUMBERS // rows.shape[1])):
        parts = len(some), len(q), -1, q.shape[-1]
        own = some.to(q).view(parts).transpose(0, 1).flatten(1, 2)  # [h, m K / (h n), n]
        turned = (own @ q).unflatten(1, (len(some), -1)).transpose(0, 1)
        share = to_gradient(turned.reshape(len(some), -1, group), ranges)
        ahead = share.view(parts).transpose(0, 1).flatten(1, 2)
        found.baddbmm_(own.mT, ahead, alpha=2 / rows.numel())
    return found


def to_gradient(x: Tensor, ranges: bool) -> Tensor:
    """Half the gradient of the square of what stands for the step of each group ``x [..., g]``.

    It is times g, and may take the place of ``x``. ``ranges``: the groups have zero points.
    """
    if learned_rotation_triton.runs_on(x):
        return learned_rotation_triton.to_gradient(x, ranges)
    if not ranges:
        _to_gradient_of_norm(x, 2)
        return x
    above, below = x.clamp(min=0), x.clamp_(max=0)
    size = _to_gradient_of_norm(above, 1) + _to_gradient_of_norm(below, 1)
    return above.add_(below).mul_(size / 4)


def _to_gradient_of_norm(x: Tensor, power: int) -> Tensor:
    """The p-norm ``[..., 1]`` of each group of ``x [..., group]``, a mean under its root.

    ``x`` becomes the gradient of the norm's ``power`` over that power, times the group's size.
    """
    top = x.abs().amax(-1, keepdim=True).clamp_(min=1e-20)
    share = x.div_(top)
    powers = share.square()
    for _ in range(SQUARINGS):
        share *= powers  # its powers 3, 7, 15
        powers.square_()
    mean = powers.mean(-1, keepdim=True).clamp_(min=1 / x.shape[-1])  # 0 of zeros
    share *= mean.pow(power / POWER - 1) * top ** (power - 1)
    return mean.pow_(1 / POWER) * top


def unit_rows(x: Tensor, centred: bool = False) -> Tensor:
    """``x [M, H]`` in float16, each row to a mean square of 1; rows of zeros stay.

    ``centred``: each row less its mean before that, as LayerNorm does.
    """
    x = x.float()
    x = x - x.mean(1, keepdim=True) if centred else x
    return (x / x.square().mean(1, keepdim=True).sqrt().clamp(min=1e-20)).half()


def unit_inputs(
    block: Block,
    batch: Batch,
    groups: Mapping[str, Iterable[int]],
    tokens: int,
    centred: bool = False,
) -> list[GroupedRows]:
    """Inputs ``[M, K]`` of submodules, of at most ``tokens`` tokens each, as :func:`unit_rows`.

    Those of a norm whose weight is 1 are its outputs, ``centred`` if it is a LayerNorm.

    Args:
        groups: by the submodule's name the sizes of groups in which its inputs are quantized.
    """
    seen: list[GroupedRows] = []

    def add(x: Tensor, sizes: Iterable[int]) -> None:
        values = unit_rows(x[:: -(-len(x) // tokens)], centred)
        seen.extend(GroupedRows(values, size) for size in sizes)

    if groups:
        observe(block, [batch], {name: partial(add, sizes=own) for name, own in groups.items()})
    return seen
