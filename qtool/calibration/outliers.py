"""Rows far larger than others: tokens with massive activations, rows of a weight.

What comes next often divides a row by its size: a norm divides a token of the residual stream, and
a weight that reads keys or values may divide what a large row of k or v wrote. So such a row
matters no more than others, but counted at its own size its error would outweigh theirs. Here it
counts as a row of median size. Massive activations: Sun et al., 2024, arXiv 2402.17762.
"""

import torch
from torch import Tensor

#: a row above so many times the median size is an outlier, and so is a channel whose largest value
#: is above so many times the median of all channels
OUTLIER_RATIO = 16.0


def to_median(sizes: Tensor, largest: float = OUTLIER_RATIO) -> Tensor:
    """The factor ``[..., M]`` of each of M rows: median / size for outliers, 1 for the others.

    ``sizes [..., M]`` are at least 0; rows above ``largest`` times the median are outliers.
    """
    middle = median(sizes)
    return torch.where(sizes > largest * middle, middle / sizes, 1.0)


def median(sizes: Tensor) -> Tensor:
    """The median ``[..., 1]`` of the ``sizes [..., M]`` above 0; 0 if none is.

    Zeros are dead channels, or pad the tokens of an expert that sees fewer than others. It is found
    by a sort, which is deterministic on a GPU too.
    """
    most = sizes.shape[-1]
    count = (sizes > 0).sum(-1, keepdim=True)
    return sizes.sort(-1).values.gather(-1, (most - count + count // 2).clamp(max=most - 1))
