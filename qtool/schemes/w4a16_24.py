"""w4a16-24: Sparse-MARLIN, the 4-bit weights of MARLIN on a 2:4 sparse matrix.

MARLIN section 4. Of four consecutive weights of an output channel at most two are not zero; the
zeros have code 8. ``fit`` and ``quantize`` keep the two largest magnitudes of four, so a weight
that is already 2:4 sparse (pruned with the Hessian, SparseGPT) passes unchanged: a better pruning
method passes its pruned weight and needs no mask here.
"""

import torch
from torch import Tensor

from qtool.schemes.base import Params, require
from qtool.schemes.w4a16 import Marlin


class SparseMarlin(Marlin):
    """Parameters: ``scale [N, G]``."""

    name = "w4a16-24"
    sparsity = (2, 4)

    def prune(self, weight: Tensor) -> Tensor:
        # a product, so that a NaN or Inf among the pruned weights becomes NaN and is not lost
        return weight * keep_largest(weight)

    def check(self, codes: Tensor, params: Params) -> None:
        super().check(codes, params)
        kept = (fours(codes) != self.zero).sum(-1, dtype=torch.int8)
        require(kept <= 2, "at most 2 of 4 consecutive codes differ from 8")


def fours(weight: Tensor) -> Tensor:
    """``weight [N, K]`` as ``[N, K / 4, 4]``."""
    return weight.unflatten(-1, (-1, 4))


def keep_largest(weight: Tensor) -> Tensor:
    """Mask ``[N, K]`` of the 2 largest magnitudes of each 4 inputs; of equal ones the earlier.

    Every pair is compared once; the two that win at least two of their three comparisons stay.
    """
    a, b, c, d = fours(weight.abs()).unbind(-1)
    ab, ac, ad, bc, bd, cd = a >= b, a >= c, a >= d, b >= c, b >= d, c >= d
    wins = ((ab, ac, ad), (~ab, bc, bd), (~ac, ~bc, cd), (~ad, ~bd, ~cd))
    return torch.stack([p & q | r & (p | q) for p, q, r in wins], -1).flatten(-2)
