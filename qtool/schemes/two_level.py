"""What the two-level W4A8 schemes share: level 1, symmetric s8 per channel, and the product.

QServe section 3.1, LiquidGEMM section 4: ``s1[n] = max_k |W[n, k]| / 119``,
``Q8 = clamp(rne(W / s1), -119, 119)``. The second level's rounding may use the room up to 127.
"""

from abc import abstractmethod

import torch
from torch import Tensor

from qtool.schemes.arithmetic.activation import PER_TOKEN_S8
from qtool.schemes.arithmetic.products import int_matmul, scaled
from qtool.schemes.base import ClipRatio, Params, Scheme, stored_scale

PROTECTIVE_MAX = 119


class TwoLevel(Scheme):
    """A scheme whose 4-bit codes stand for ``Q8'``, which ``s1 [N]`` scales."""

    code_bits = 4
    signed = False
    group_sizes = (32, 64, 128)
    activation = PER_TOKEN_S8

    @abstractmethod
    def exact_level2(self, codes: Tensor, params: Params) -> Tensor:
        """:meth:`level2` in float32, which holds these integers exactly."""

    def level2(self, codes: Tensor, params: Params) -> Tensor:
        """``Q8'``, the int8 weight ``[N, K]`` that the tensor cores multiply."""
        return self.exact_level2(codes, params).to(torch.int8)

    def dequantize(self, codes: Tensor, params: Params) -> Tensor:
        return self.exact_level2(codes, params).mul_(params["s1"].float()[:, None])

    def matmul(
        self, x: Tensor, codes: Tensor, params: Params, bias: Tensor | None = None
    ) -> Tensor:
        qx, sx = self.activation.quantize(x)
        return scaled(int_matmul(qx, self.level2(codes, params)), sx, params["s1"], bias)


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
