"""Rows far larger than others: tokens with massive activations, rows of a weight.

What comes next often divides a row by its size: a norm divides a token of the residual stream, and
a reader of keys or values what a large row of k or v wrote. So such a row matters no more than
others, but its error would outweigh theirs if it counted as it is. Here it counts as a row of
median size. Massive activations: Sun et al., 2024, arXiv 2402.17762.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

#: a row above so many times the median size is an outlier, and so is a channel in its largest value
LARGEST = 16.0


def to_median(
    sizes: Tensor, largest: float = LARGEST, counts: Sequence[int] | None = None
) -> Tensor:
    """The factor ``[..., M]`` of each of M rows: median / size for outliers, 1 for the others.

    Args:
        sizes: ``[..., M]``, at least 0.
        largest: rows above so many times the median are outliers.
        counts: as for :func:`median`.
    """
    middle = median(sizes, counts)
    return torch.where((sizes > largest * middle) & (middle > 0), middle / sizes, 1.0)


def median(sizes: Tensor, counts: Sequence[int] | None = None) -> Tensor:
    """The median ``[..., 1]``, by a sort, which is deterministic on a GPU too.

    ``counts`` has the number of rows of each of E experts, whose ``sizes [E, M]`` hold zeros behind
    them; without it, all M count.
    """
    most = sizes.shape[-1]
    ordered = sizes.sort(-1).values
    if counts is None:
        return ordered[..., most // 2, None]
    middle = torch.tensor([most - count + count // 2 for count in counts])
    return ordered.gather(-1, middle[:, None].to(sizes.device, non_blocking=True))
