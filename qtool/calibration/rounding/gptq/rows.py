"""Feedback between the rows of a weight, for a cost that the errors of all rows share.

The rounding minimizes ``tr(G E H E^T)``: :mod:`.output_hessian` has G. Rows are rounded a chunk at
a time, and the target of a chunk moves, so that it makes up for the errors E of the chunks before:

    T_b <- T_b + sum_{r<b} M_rb^T E_r    M = R blockdiag(R)^-1 - I,   G = R R^T, R upper triangular

This is GPTQ's feedback between columns (:mod:`.gptq`), with rows for columns and chunks for single
columns. Rows of one chunk do not see each other, so that a GPU rounds many at once.

Legend: N rows, K columns.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from qtool.calibration.precision import product

#: most rows that make up for each other's errors: the time of G's factor grows as their cube
MOST_ROWS = 8192
#: chunks into which the rows are cut; chunk c has the rows c, c + CHUNKS, ...
CHUNKS = 4
#: share of the mean of ``diag G`` that is added to it, because G is an estimate
DAMPING = 0.3


def row_chunks(
    targets: Sequence[Tensor], errors: Sequence[Tensor], g: Tensor
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """The rows of each chunk, and the moved targets ``[rows, K]`` of several weights.

    Args:
        targets: T ``[N, K]`` of each weight.
        errors: E ``[N, K]``, into which the caller writes each chunk's before it takes the next.
        g: G ``[N, N]`` of all; a row on which nothing depends is rounded by itself.
    """
    every = torch.arange(len(g), device=g.device)
    chunks = [every[chunk::CHUNKS] for chunk in range(CHUNKS)]
    order = torch.cat(chunks)
    r = upper_factor(g, order)
    for start, stop in pairwise(accumulate(map(len, chunks), initial=0)):
        own = slice(start, stop)
        moved = [target[order[own]] for target in targets]
        if start:
            feedback = torch.linalg.solve_triangular(
                r[own, own], r[:start, own], upper=True, left=False
            ).T.contiguous()
            for target, error in zip(moved, errors, strict=True):
                target += product(feedback, error[order[:start]])
        yield order[own], moved


def upper_factor(g: Tensor, order: Tensor) -> Tensor:
    """R ``[N, N]`` of the damped G, its rows in this order."""
    backwards = order.flip(0)
    damped, mean = g[backwards][:, backwards], g.diagonal().mean()
    damped.diagonal().add_(torch.where(mean > 0, DAMPING * mean, 1.0))
    lower, _ = torch.linalg.cholesky_ex(damped)  # damped as it is, it has one: no check of it waits
    return lower.flip(0, 1)
