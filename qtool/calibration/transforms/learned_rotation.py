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


@torch.no_grad()
def learn(
    rows: Tensor, start: Tensor, group: int, steps: int, inputs: Tensor | None = None
) -> Tensor:
    """``Q [H, H]``, float64, from the orthogonal ``start [H, H]``.

    Args:
        rows: ``[M, H]``, float32. group: channels of a group. steps: of Adam.
        inputs: ``[M', H]``, likewise; None: the axes.
    """
    q = start.to(rows)
    one = torch.eye(len(q), dtype=q.dtype, device=q.device)
    batches = _shuffled(rows)
    beside, weight = ([one * len(q) ** 0.5], AXES) if inputs is None else (_shuffled(inputs), 1.0)
    mean, squares = torch.zeros_like(q), torch.zeros_like(q)
    for step in range(steps):
        found = gradient(batches[step % len(batches)], q, group)
        ahead = q.T @ found.add_(gradient(beside[step % len(beside)], q, group), alpha=weight)
        skew = ahead - ahead.T
        mean.lerp_(skew, 1 - MOMENTUM)
        squares.lerp_(skew.square(), 1 - SQUARES)
        scale = (squares / (1 - SQUARES ** (step + 1))).sqrt_().clamp_(min=1e-20)
        half = mean / scale * (RATE * (1 - step / steps) / (1 - MOMENTUM ** (step + 1)) / 2)
        q = q @ torch.linalg.solve(one + half, one - half)
    left, _, right = torch.linalg.svd(q.double())
    return left @ right


def _shuffled(rows: Tensor) -> Sequence[Tensor]:
    """The rows of each step, ``[BATCH H, H]``."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    return rows[order.to(rows.device)].split(BATCH * rows.shape[1])


def step_flops(hidden: int) -> float:
    """Operations of a step: products with its rows and the axes, twice each, and the solve.

    Those with inputs come on top of it.
    """
    return (4 * (BATCH + 1) + 4 + 8 / 3) * float(hidden) ** 3


def gradient(rows: Tensor, q: Tensor, group: int) -> Tensor:
    """The gradient ``[H, H]`` of the mean over the groups of ``rows q``."""
    turned = (rows @ q).unflatten(-1, (-1, group))
    top = turned.abs().amax(-1, keepdim=True).clamp_(min=1e-20)
    share = turned / top
    power = share.square()
    for _ in range(SQUARINGS):
        power = power.square()
    norm = power.mean(-1, keepdim=True).clamp_(min=1 / group).pow_(2 / POWER - 1)  # 0 of zeros
    power /= torch.where(share == 0, 1.0, share)
    power *= norm * top
    return rows.T @ power.flatten(-2) * (2 / power.numel())
