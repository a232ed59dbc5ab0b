"""Level 1 of the two-level W4A8 schemes: per-channel symmetric s8 inside the protective range.

QServe section 3.1, LiquidGEMM section 4: ``s1[n] = max_k |W[n, k]| / 119``,
``Q8 = clamp(rne(W / s1), -119, 119)``. The head room to 127 is what the second level's rounding may use.
"""

import torch
from torch import Tensor

from qtool.schemes.base import Clip, stored_scale

PROTECTIVE_MAX = 119


def fit_level1(weight: Tensor, clip: Clip, dtype: torch.dtype) -> Tensor:
    """Stored scale ``s1 [N]`` of ``weight [N, K]``; a row of zeros gets 1."""
    amax = weight.float().abs().amax(1) * clip
    return stored_scale(torch.where(amax > 0, amax / PROTECTIVE_MAX, 1.0), dtype)


def quantize_level1(weight: Tensor, s1: Tensor) -> Tensor:
    """``Q8 [N, K]``, integers in -119..119 held in float32."""
    codes = torch.round(weight.float() / s1.float()[:, None])
    return codes.clamp(-PROTECTIVE_MAX, PROTECTIVE_MAX)
