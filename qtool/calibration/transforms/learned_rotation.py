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

A rotation has ``H (H - 1) / 2`` free numbers, and what it wins falls with the number of groups over
that: rows of random numbers are served as well as those of a model.

Legend: H hidden size, M rows.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtool.calibration.precision import tensor_cores

#: of the norm: squarings of a square
SQUARINGS = 3
POWER = 2 ** (SQUARINGS + 1)
#: of the first step, in radians of a plane; it falls to 0
RATE = 0.03
MOMENTUM, SQUARES = 0.9, 0.99
#: rows of a step, in H
BATCH = 16
#: what the axes count beside the rows; inputs count as much as rows
AXES = 0.3
#: numbers of a step's rows that are looked at together
TOGETHER = 1 << 25


@torch.no_grad()
def learn(
    rows: Sequence[Tensor],
    start: Tensor,
    group: int,
    steps: int,
    inputs: Sequence[Tensor] = (),
) -> Tensor:
    """``Q [H, H]``, float64, from the orthogonal ``start [H, H]``.

    Args:
        rows: each ``[M, H]``. group: channels of a group. steps: of Adam.
        inputs: likewise; none: the axes.
    """
    q = start.float().to(rows[0].device)
    one = torch.eye(len(q), device=q.device)
    beside, weight = (inputs, 1.0) if inputs else ([one * len(q) ** 0.5], AXES)
    mean, squares = torch.zeros_like(q), torch.zeros_like(q)
    for step in range(steps):
        with tensor_cores():
            found = gradient(_of_step(rows, step), q, group)
            found.add_(gradient(_of_step(beside, step), q, group), alpha=weight)
        ahead = q.T @ found
        skew = ahead - ahead.T
        mean.lerp_(skew, 1 - MOMENTUM)
        squares.lerp_(skew.square(), 1 - SQUARES)
        scale = (squares / (1 - SQUARES ** (step + 1))).sqrt_().clamp_(min=1e-20)
        half = mean / scale * (RATE * (1 - step / steps) / (1 - MOMENTUM ** (step + 1)) / 2)
        q = q @ torch.linalg.solve(one + half, one - half)
    q = q.double()
    for _ in range(4):  # Newton's iteration to the nearest orthogonal matrix
        q = 1.5 * q - 0.5 * q @ (q.T @ q)
    return q


def _of_step(parts: Sequence[Tensor], step: int) -> Tensor:
    """About ``BATCH H`` rows, of each part its share; all rows in turn.

    Every n-th row, with an odd n: the rows of a head are a power of two.
    """
    turns = -(-sum(map(len, parts)) // (BATCH * parts[0].shape[1]))
    n = turns + 1 - turns % 2
    return torch.cat([part[(step + number) % n :: n] for number, part in enumerate(parts)])


def step_flops(hidden: int) -> float:
    """Operations of a step: products with its rows and the axes, twice each, and the solve.

    Those with inputs come on top of it.
    """
    return (4 * (BATCH + 1) + 4 + 8 / 3) * float(hidden) ** 3


def gradient(rows: Tensor, q: Tensor, group: int) -> Tensor:
    """The gradient ``[H, H]`` of the mean over the groups of ``rows q``, ``[M, H]``."""
    found = torch.zeros_like(q)
    for part in rows.split(max(1, TOGETHER // len(q))):
        own = part.to(q)
        turned = (own @ q).unflatten(-1, (-1, group))
        top = turned.abs().amax(-1, keepdim=True).clamp_(min=1e-20)
        share = turned / top
        power = share.square()
        for _ in range(SQUARINGS):
            power = power.square()
        norm = power.mean(-1, keepdim=True).clamp_(min=1 / group).pow_(2 / POWER - 1)  # 0 of zeros
        power /= torch.where(share == 0, 1.0, share)
        power *= norm * top
        found.addmm_(own.T, power.flatten(-2), alpha=2 / rows.numel())
    return found
