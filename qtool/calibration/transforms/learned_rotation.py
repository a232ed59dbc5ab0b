"""An orthogonal matrix that makes the maxima of groups of weights, and of their inputs, small.

SpinQuant (Liu et al., 2024, arXiv 2405.16406) learns the rotation of the residual stream on the
manifold of orthogonal matrices, by the loss of the quantized model. Here the quantized model does
not run: the step of a group is its largest magnitude over the largest code, and the squared
rounding error is proportional to the step's square. For rows w of the weights that read the
residual stream, each scaled to a mean square of 1,

    minimize    mean over groups g of    (mean_g |w Q|^p)^(2/p)        p = 16

where the p-norm approximates the maximum, and each weight has the groups of its scheme. If a group
has a zero point, its step follows from its range, so half the sum of the norms of its positive and
of its negative part replaces its norm. The same mean over the inputs of these weights is added if
inputs have no more bits than weights. If inputs have more bits, the axes replace them with the
weight 0.3, because an outlier of the activations is a channel of the residual stream and has to
stay spread. With G the gradient in Q, the skew-symmetric ``S = Q^T G - G^T Q`` is the direction on
the manifold. Adam makes a step Y from it, which Cayley's transform applies: ``Q <- Q (I + Y/2)^-1
(I - Y/2)``. With A = Y/2 skew-symmetric that is ``2 Q (I + A^T A)^-1 (I - A) - Q``: no pivots.

A rotation has ``n (n - 1) / 2`` free numbers, and its gain falls as the ratio of the number of
groups to these grows: rows of random numbers gain as much as a model's rows.

The matrices of the value heads are learned together. Their rows are those of the weight that reads
the heads' sums, and a group of its columns may span several heads.

Legend: n order of a matrix, h matrices, M rows, K columns, of which each matrix rotates K / h.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import gcd

import torch
from torch import Tensor
from torch.linalg import solve_triangular

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import observe
from qtool.calibration.precision import tensor_cores
from qtool.calibration.recorded import Recorded
from qtool.calibration.transforms import learned_rotation_triton

#: number of times that squares are squared for the norm's power: p = 2 ** (SQUARINGS + 1)
SQUARINGS = 3
POWER = 2 ** (SQUARINGS + 1)
#: share of a group's maximum up to which a number counts as 0: from 0.003 down its 15th power is a
#: subnormal float32, which a CPU multiplies many times as slowly as others
SMALLEST = 0.01
#: size of the first step, in radians of a plane times the root of n; it falls to 0 with the root of
#: the share of steps that are left
RATE = 0.75
MOMENTUM, SQUARES = 0.8, 0.95
#: rows of a step, as a multiple of n
BATCH = 16
#: weight of the axes relative to the rows; inputs have the weight 1
AXES = 0.3
#: tokens of all batches whose inputs are taken
TOKENS = 2048
#: a step has many small operations and takes at least as long as so many candidates of a search
STEP_TRIES = 6
#: elements of a step's rows that are processed together
STEP_NUMBERS = 1 << 25
#: largest order whose steps a CUDA graph launches, since launching one takes longer than running it
RECORDED = 512


@dataclass(eq=False)
class Dense:
    """An orthogonal ``Q [n, n]``: call it on ``x [..., n]`` for ``x Q``.

    The matrix stays on the device where it was last used.
    """

    matrix: Tensor

    @property
    def n(self) -> int:
        return self.matrix.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        return (x.double() @ self.on(x.device)).to(x.dtype)

    def on(self, device: torch.device) -> Tensor:
        """The matrix on ``device``; another thread may move it elsewhere at the same time."""
        self.matrix = matrix = self.matrix.to(device)
        return matrix


@dataclass(frozen=True, eq=False)
class GroupedRows:
    """Rows of a weight or of its inputs, and the groups in which they are quantized.

    Attributes:
        values: the rows ``[M, K]``.
        group: number of channels in a group.
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
    """The learned ``Q [h, n, n]``, float64, from the orthogonal ``start [h, n, n]``.

    Args:
        steps: number of steps of Adam.
        inputs: inputs of the weights; without any, the axes replace them.
        keeps_ones: as in :func:`descend`.
    """
    matrices, order = start.shape[:2]
    device = weights[0].values.device
    beside, weight = inputs, 1.0
    if not inputs:
        axes = torch.eye(order, device=device).repeat(1, matrices) * order**0.5
        group = gcd(min(part.group for part in weights), order)
        beside, weight = [GroupedRows(axes, group)], AXES

    def gradient_of(q: Tensor, step: int) -> Tensor:
        found = gradient_of_step(weights, q, step)
        return found.add_(gradient_of_step(beside, q, step), alpha=weight)

    return descend(start.to(device), steps, gradient_of, keeps_ones)


def gradient_of_step(parts: Sequence[GroupedRows], q: Tensor, step: int) -> Tensor:
    """The gradient ``[h, n, n]`` of the mean over the elements of the rows of this step."""
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
    keeps_ones: bool,
) -> Tensor:
    """``Q [h, n, n]``, float64, from the orthogonal ``start [h, n, n]``, on its device.

    Args:
        steps: number of steps of Adam.
        gradient_of: function from Q and the step's number to the gradient ``[h, n, n]`` in Q.
        keeps_ones: keep ``ones Q = ones``, as LayerNorm needs, if ``start`` has it: the rows and
            the columns of each step Y then sum to 0.
    """
    recorded = start.is_cuda and start.shape[-1] <= RECORDED
    own = (_recorded if recorded else Descent)(start.shape, start.device, keeps_ones)
    own.begin(start)
    for step in range(steps):
        share = 1 - SQUARES ** (step + 1)
        size = RATE * ((1 - step / steps) / start.shape[-1]) ** 0.5
        rate = size / (1 - MOMENTUM ** (step + 1)) / 2
        own.move(gradient_of(own.q, step), own.q.new_full((), share), own.q.new_full((), rate))
    q = own.q.double()
    for _ in range(4):  # Newton's iteration to the nearest orthogonal matrix
        q = 1.5 * q - 0.5 * q @ (q.mT @ q)
    return q


class Descent:
    """The matrices ``q [h, n, n]`` of :func:`descend`, float32, and the moments of its Adam.

    Attributes:
        move: function that takes a step, from the gradient in q, the share of the squares that
            :attr:`squares` holds, and the rate.
    """

    def __init__(self, shape: torch.Size, device: torch.device, keeps_ones: bool) -> None:
        self.q, self.mean, self.squares = torch.empty(3, *shape, device=device)
        self.one, self.keeps_ones = torch.eye(shape[-1], device=device), keeps_ones
        self.move: Callable[[Tensor, Tensor, Tensor], None] = self._move

    def begin(self, start: Tensor) -> None:
        """Start at the orthogonal ``start [h, n, n]``."""
        self.q.copy_(start)
        self.mean.zero_()
        self.squares.zero_()

    def _move(self, in_q: Tensor, share: Tensor, rate: Tensor) -> None:
        with tensor_cores():
            product = self.q.mT @ in_q
        skew = product - product.mT
        self.mean.lerp_(skew, 1 - MOMENTUM)
        self.squares.lerp_(skew.square(), 1 - SQUARES)
        half = self.mean / (self.squares / share).sqrt_().clamp_(min=1e-20) * rate
        if self.keeps_ones:  # the means of a skew-symmetric matrix's columns are minus its rows'
            means = half.mean(-1, keepdim=True)
            half = half - means + means.mT
        # the matrix is positive definite, so no check waits for the GPU
        factor, _ = torch.linalg.cholesky_ex(half.mT @ half + self.one)
        # 3 times as fast for small matrices on a GPU as cholesky_solve
        inner = solve_triangular(factor, self.one - half, upper=False)
        self.q.copy_(2 * self.q @ solve_triangular(factor.mT, inner, upper=True) - self.q)


@lru_cache(maxsize=1)
def _recorded(shape: torch.Size, device: torch.device, keeps_ones: bool) -> Descent:
    """A descent whose steps a CUDA graph replays, for all blocks.

    Recording takes about as long as the steps of a block.
    """
    own = Descent(shape, device, keeps_ones)
    own.move = Recorded(own.move, may_wait=False)
    return own


def rows_of_step(sizes: Sequence[int], order: int, step: int) -> list[slice]:
    """About ``BATCH order`` rows, a proportional share of each part; the steps take turns.

    A slice has every n-th row with an odd n, because the rows of a head are a power of two.
    """
    turns = -(-sum(sizes) // (BATCH * order))
    n = turns + 1 - turns % 2
    return [slice((step + number) % n, None, n) for number in range(len(sizes))]


def step_flops(order: int, matrices: int = 1, columns: int = 0) -> float:
    """Operations of a step: two products with its rows, and the rest counted as such products.

    The rest (axes, powers, a solve by factorization) has fewer but slower operations. Products with
    inputs are not counted. ``columns`` is K; 0 means the order.
    """
    return (4 * BATCH * (columns or order) + 100 * matrices * order) * float(order) ** 2


def gradient(rows: Tensor, q: Tensor, group: int, ranges: bool = False) -> Tensor:
    """The gradient ``[h, n, n]`` of the mean over the groups of ``rows [M, K]``, rotated by q.

    With ``ranges`` the groups have zero points. On a GPU the factors of both products are float16,
    whose mantissa is as long as TF32's and whose products take half the time.
    """
    found = torch.zeros_like(q)
    factor, scale = q.half() if q.is_cuda else q, 2 * group / rows.numel()
    for some in rows.split(max(1, STEP_NUMBERS // rows.shape[1])):
        parts = len(some), len(q), -1, q.shape[-1]
        own = some.to(factor).view(parts).transpose(0, 1).flatten(1, 2)  # [h, m K / (h n), n]
        turned = (own @ factor).unflatten(1, (len(some), -1)).transpose(0, 1)
        in_turned = to_gradient(turned.reshape(len(some), -1, group), ranges).to(factor)
        in_turned = in_turned.view(parts).transpose(0, 1).flatten(1, 2)
        if q.is_cuda:
            found.add_(torch.bmm(own.mT, in_turned, out_dtype=q.dtype), alpha=scale)
        else:
            found.baddbmm_(own.mT, in_turned, alpha=scale)
    return found


def to_gradient(x: Tensor, ranges: bool) -> Tensor:
    """Half the gradient of the squared step of each group ``x [..., g]``, approximated by norms.

    The result may overwrite ``x``. With ``ranges`` the groups have zero points.
    """
    if learned_rotation_triton.runs_on(x):
        return learned_rotation_triton.to_gradient(x, ranges)
    x = x.float() if x.dtype == torch.float16 else x
    if not ranges:
        _to_gradient_of_norm(x, 2)
        return x
    above, below = x.clamp(min=0), x.clamp_(max=0)
    size = _to_gradient_of_norm(above, 1) + _to_gradient_of_norm(below, 1)
    return above.add_(below).mul_(size / 4)


def _to_gradient_of_norm(x: Tensor, power: int) -> Tensor:
    """The p-norm ``[..., 1]`` of each group of ``x [..., group]``, with a mean under the root.

    ``x`` becomes the gradient of the norm to the ``power``, divided by the power.
    """
    top = x.abs().amax(-1, keepdim=True).clamp_(min=1e-20)
    share = torch.hardshrink(x.div_(top), SMALLEST, out=x)
    powers = share.square()
    for _ in range(SQUARINGS):
        share *= powers  # share to the power of 3, 7, 15
        powers.square_()
    size = x.shape[-1]
    mean = powers.mean(-1, keepdim=True).clamp_(min=1 / size)  # a group of zeros has 0
    share *= mean.pow(power / POWER - 1) * top ** (power - 1) / size
    return mean.pow_(1 / POWER) * top


def unit_rows(x: Tensor, centred: bool = False) -> Tensor:
    """``x [M, H]`` in float16 with each row scaled to a mean square of 1; rows of zeros stay.

    With ``centred`` the row's mean is subtracted first, as LayerNorm does.
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
    """Inputs ``[M, K]`` of submodules, at most ``tokens`` tokens each, through :func:`unit_rows`.

    For a norm whose weight is 1 they equal its outputs, with ``centred`` if it is a LayerNorm.

    Args:
        groups: the sizes of groups in which a submodule's inputs are quantized, by its name.
    """
    seen: list[GroupedRows] = []

    def add(x: Tensor, sizes: Iterable[int]) -> None:
        values = unit_rows(x[:: -(-len(x) // tokens)], centred)
        seen.extend(GroupedRows(values, size) for size in sizes)

    if groups:
        observe(block, [batch], {name: partial(add, sizes=own) for name, own in groups.items()})
    return seen
