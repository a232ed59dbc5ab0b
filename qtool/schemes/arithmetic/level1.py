"""Level 1 of the two-level W4A8 schemes: per-channel symmetric s8 inside the protective range.

QServe section 3.1, LiquidGEMM section 4: ``s1[n] = max_k |W[n, k]| / 119``,
``Q8 = clamp(rne(W / s1), -119, 119)``. The second level's rounding may use the room up to 127.
"""

import torch
from torch import Tensor

from qtool.schemes.base import ClipRatio, stored_scale

PROTECTIVE_MAX = 119


def fit_level1(low: Tensor, high: Tensor, clip: ClipRatio, dtype: torch.dtype) -> Tensor:
    """Stored scale ``s1 [N]`` from the range ``[N, G]`` of each group; a row of zeros gets 1."""
    amax = torch.maximum(low.abs(), high.abs()).amax(1) * clip
    return stored_scale(torch.where(amax > 0, amax / PROTECTIVE_MAX, 1.0), dtype)


def quantize_level1(weight: Tensor, s1: Tensor) -> Tensor:
    """``Q8``, integers in -119..119 held in float32, of ``weight [N, ...]`` float32.

    Rounding is monotone, so the smallest ``Q8`` of a group is that of its smallest weight.
    """
    codes = weight / s1.float().view(-1, *[1] * (weight.dim() - 1))
    return codes.round_().clamp_(-PROTECTIVE_MAX, PROTECTIVE_MAX)
