"""An orthogonal matrix after which groups of weights, and of their inputs, have small maxima.

SpinQuant (Liu et al., 2024, arXiv 2405.16406) learns the rotation of the residual stream on the
manifold of orthogonal matrices, by the loss of the quantized model. Here that model need not run:
the step of a group is its largest magnitude over the largest code, and the squared error of
rounding goes with the step's square. For rows w of the weights that read the residual stream, each
scaled to a mean square of 1,

    minimize    mean over groups g of    (mean_g |w Q|^p)^(2/p)        p = 16

where the p-norm stands for the maximum. To it comes the same of the inputs of these weights where
they have 4 bits. Where they have more, the axes stand for them with the weight 0.3: an outlier of
the activations is a channel of the residual stream, and has to stay spread. With G the gradient in
Q, the skew-symmetric ``S = Q^T G - G^T Q`` is the direction on the manifold. Adam turns it into a
step Y, and Cayley's transform takes it: ``Q <- Q (I + Y/2)^-1 (I - Y/2)``.

A rotation has ``n (n - 1) / 2`` free numbers, and what it wins falls with the number of groups over
that: rows of random numbers are served as well as those of a model.

The matrices of the value heads are learned together: the rows are those of the weight that reads
the heads' sums, and a group of their columns may lie across heads.

Legend: n order of a matrix, h matrices, M rows, K columns, of which each matrix turns K / h.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import observe

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
#: of a batch of which inputs are taken
TOKENS = 2048


@dataclass(frozen=True, eq=False)
class Dense:
    """An orthogonal ``Q [n, n]``: call it on ``x [..., n]`` for ``x Q``."""

    matrix: Tensor

    @property
    def n(self) -> int:
        return self.matrix.shape[-1]

    def __call__(self, x: Tensor) -> Tensor:
        return (x.double() @ self.matrix.to(x.device)).to(x.dtype)


@torch.no_grad()
def learn(
    rows: Tensor, start: Tensor, group: int, steps: int, inputs: Tensor | None = None
) -> Tensor:
    """``Q [h, n, n]``, float64, from the orthogonal ``start [h, n, n]``.

    Args:
        rows: ``[M, K]``, float32. group: channels of a group. steps: of Adam.
        inputs: ``[M', K]``, likewise; None: the axes.
    """
    q = start.to(rows)
    matrices, order = q.shape[:2]
    one = torch.eye(order, dtype=q.dtype, device=q.device)
    batches = _shuffled(rows, order)
    beside: Sequence[Tensor] = [one.repeat(1, matrices) * order**0.5]
    weight, size = AXES, gcd(group, order)
    if inputs is not None:
        beside, weight, size = _shuffled(inputs, order), 1.0, group
    mean, squares = torch.zeros_like(q), torch.zeros_like(q)
    for step in range(steps):
        found = gradient(batches[step % len(batches)], q, group)
        ahead = q.mT @ found.add_(gradient(beside[step % len(beside)], q, size), alpha=weight)
        skew = ahead - ahead.mT
        mean.lerp_(skew, 1 - MOMENTUM)
        squares.lerp_(skew.square(), 1 - SQUARES)
        scale = (squares / (1 - SQUARES ** (step + 1))).sqrt_().clamp_(min=1e-20)
        half = mean / scale * (RATE * (1 - step / steps) / (1 - MOMENTUM ** (step + 1)) / 2)
        q = q @ torch.linalg.solve(one + half, one - half)
    left, _, right = torch.linalg.svd(q.double())
    return left @ right


def _shuffled(rows: Tensor, order: int) -> Sequence[Tensor]:
    """The rows of each step, ``[BATCH n, K]``."""
    places = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[places.to(rows.device)].split(BATCH * order)


def step_flops(order: int, matrices: int = 1, columns: int = 0) -> float:
    """Operations of a step: products with its rows and the axes, twice each, and the solve.

    Those with inputs come on top of it. ``columns``: K; 0: the order.
    """
    return (4 * BATCH * (columns or order) + matrices * (8 + 8 / 3) * order) * float(order) ** 2


def gradient(rows: Tensor, q: Tensor, group: int) -> Tensor:
    """The gradient ``[h, n, n]`` of the mean over the groups of ``rows [M, K]``, turned by q."""
    parts = rows.view(len(rows), len(q), -1, q.shape[-1])  # [M, h, K / (h n), n]
    turned = torch.einsum("mhri,hij->mhrj", parts, q).flatten(1).unflatten(-1, (-1, group))
    top = turned.abs().amax(-1, keepdim=True).clamp_(min=1e-20)
    share = turned / top
    power = share.square()
    for _ in range(SQUARINGS):
        power = power.square()
    norm = power.mean(-1, keepdim=True).clamp_(min=1 / group).pow_(2 / POWER - 1)  # 0 of zeros
    power /= torch.where(share == 0, 1.0, share)
    power *= norm * top
    return torch.einsum("mhri,mhrj->hij", parts, power.view_as(parts)) * (2 / power.numel())


def unit_rows(x: Tensor) -> Tensor:
    """``x [M, H]`` in float32, each row to a mean square of 1; rows of zeros stay."""
    return x.float() / x.float().square().mean(1, keepdim=True).sqrt().clamp(min=1e-20)


def unit_inputs(block: Block, batch: Batch, names: Iterable[str]) -> list[Tensor]:
    """Inputs ``[M, K]`` of submodules, of :data:`TOKENS` tokens each, as :func:`unit_rows`.

    Of a norm whose weight is 1 they are the outputs.
    """
    seen: list[Tensor] = []
    if observers := dict.fromkeys(names, seen.append):
        observe(block, [batch], observers)
    return [unit_rows(x[:: -(-len(x) // TOKENS)]) for x in seen]
