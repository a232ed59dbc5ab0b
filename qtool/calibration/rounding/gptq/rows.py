"""Feedback between the rows of a weight, for a cost that the errors of all rows share.

The rounding minimizes ``tr(G E H E^T)``: :mod:`.output_hessian` has G. Rows are rounded a chunk at
a time, and the target of a chunk moves, so that it makes up for the errors E of the chunks before:

    T_b <- T_b + sum_{r<b} M_rb^T E_r    M = R blockdiag(R)^-1 - I,   G = R R^T, R upper triangular

This is GPTQ's feedback between columns (:mod:`.gptq`), with rows for columns and chunks for single
columns. Rows of one chunk do not see each other, so that a GPU rounds many at once.

Legend: N rows of a set, K columns.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from qtool.calibration.precision import product

#: most rows of a set
MOST_ROWS = 8192
#: chunks into which the rows are cut; chunk c has the rows c, c + CHUNKS, ... of each set
CHUNKS = 4
#: share of the mean of ``diag G`` that is added to it, because G is an estimate
DAMPING = 0.3


def row_chunks(
    target: Tensor, error: Tensor, hessians: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of each chunk, and their moved target ``[rows, K]``.

    Args:
        target: T of all rows.
        error: E of all rows, into which the caller writes each chunk's before it takes the next.
        hessians: G of each set ``[N, N]``; a row on which nothing depends is rounded by itself.
    """
    sets = row_sets(len(target))
    orders = [by_chunk(rows, target.device) for rows in sets]
    factors = [
        upper_factor(g, (order - rows.start) // rows.step)
        for g, order, rows in zip(hessians, orders, sets, strict=True)
    ]
    for chunk in range(CHUNKS):
        every, moved = [], []
        for order, r in zip(orders, factors, strict=True):
            sizes = (len(range(c, len(order), CHUNKS)) for c in range(CHUNKS))
            start, stop = [*pairwise(accumulate(sizes, initial=0))][chunk]
            own = slice(start, stop)
            wanted = target[order[own]]
            if start:
                feedback = torch.linalg.solve_triangular(
                    r[own, own], r[:start, own], upper=True, left=False
                )
                wanted += product(feedback.T.contiguous(), error[order[:start]])
            every.append(order[own])
            moved.append(wanted)
        yield torch.cat(every), torch.cat(moved)


def row_sets(rows: int) -> list[range]:
    """The rows of each of S sets, which do not depend on each other.

    Set s has the rows s, s + S, ..., so that the rows of one channel of gate and up, which are
    stacked, are in one set.
    """
    count = -(-rows // MOST_ROWS)
    return [range(s, rows, count) for s in range(count)]


def by_chunk(rows: range, device: torch.device) -> Tensor:
    """``rows``, chunk by chunk."""
    chunks = (rows[chunk::CHUNKS] for chunk in range(CHUNKS))
    return torch.tensor([row for chunk in chunks for row in chunk], device=device)


def upper_factor(g: Tensor, order: Tensor) -> Tensor:
    """R ``[N, N]`` of the damped G, its rows in this order."""
    backwards = order.flip(0)
    damped, mean = g[backwards][:, backwards], g.diagonal().mean()
    damped.diagonal().add_(torch.where(mean > 0, DAMPING * mean, 1.0))
    return torch.linalg.cholesky(damped).flip(0, 1)
