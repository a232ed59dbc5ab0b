"""w4a8-lqq: LiquidQuant, a two-level W4A8 scheme whose dequantization is one IMAD and one XOR.

LiquidGEMM section 4. Per output channel, then per group of g input channels:

    s1 = max|W| / 119                Q8 = clamp(rne(W / s1), -119, 119)
    lo = min Q8    s2 = clamp(rne((max Q8 - lo) / 15), 1, 16)    Q4 = clamp(rne((Q8 - lo) / s2), 0, 15)
    a = 128 + lo                     Q8' = (Q4 * s2 + a) XOR 0x80 = Q4 * s2 + lo

The sum ``Q4 * s2 + a`` never leaves 0..255, so four bytes of a word are dequantized at once.
"""

import torch
from torch import Tensor

from qtool.schemes.activation import PER_TOKEN_S8
from qtool.schemes.base import Clip, Grid, Params, Scheme, int_matmul, require, require_finite
from qtool.schemes.level1 import PROTECTIVE_MAX, fit_level1, quantize_level1


class LiquidQuant(Scheme):
    """Parameters: ``s1 [N]`` scale, ``s2 [N, G]`` u8 in 1..16, ``offset [N, G]`` u8 (``a = 128 + lo``)."""

    name = "w4a8-lqq"
    code_bits = 4
    signed = False
    group_sizes = (32, 64, 128)
    activation = PER_TOKEN_S8

    def __init__(self, group_size: int | None = 64, scale_dtype: torch.dtype = torch.float32) -> None:
        super().__init__(group_size, scale_dtype)

    def fit(self, weight: Tensor, *, clip: Clip = 1.0, group_clip: Clip = 1.0) -> Params:
        require_finite(weight, self.name)
        s1 = fit_level1(weight, clip, self.scale_dtype)
        q8 = self.groups(quantize_level1(weight, s1))  # [N, G, g]
        ratio = torch.as_tensor(group_clip, device=weight.device)
        low = torch.round(q8.amin(-1) * ratio)
        s2 = torch.round((torch.round(q8.amax(-1) * ratio) - low) / 15).clamp(1, 16)
        return {"s1": s1, "s2": s2.to(torch.uint8), "offset": (low + 128).to(torch.uint8)}

    def grid(self, params: Params) -> Grid:
        s1 = params["s1"].float()[:, None]
        s2 = params["s2"].float()
        low = params["offset"].float() - 128
        bound = torch.zeros_like(s2, dtype=torch.int32)
        return Grid(s1 * s2, s1 * low, bound, bound + 15)

    def quantize(self, weight: Tensor, params: Params) -> Tensor:
        q8 = self.groups(quantize_level1(weight, params["s1"]))  # [N, G, g]
        low = params["offset"].float()[..., None] - 128
        codes = torch.round((q8 - low) / params["s2"].float()[..., None]).clamp(0, 15)
        return codes.to(torch.uint8).flatten(1)

    def level2(self, codes: Tensor, params: Params) -> Tensor:
        """``Q8' = Q4 * s2 + lo``, the int8 weight ``[N, K]`` that the tensor cores multiply."""
        product = self.groups(codes).to(torch.int16) * params["s2"].to(torch.int16)[..., None]
        return (product + params["offset"].to(torch.int16)[..., None] - 128).to(torch.int8).flatten(1)

    def dequantize(self, codes: Tensor, params: Params) -> Tensor:
        return self.level2(codes, params).float() * params["s1"].float()[:, None]

    def matmul(self, x: Tensor, codes: Tensor, params: Params) -> Tensor:
        qx, sx = self.activation.quantize(x)
        return int_matmul(qx, self.level2(codes, params)).float() * sx * params["s1"].float()

    def check(self, codes: Tensor, params: Params) -> None:
        s2, offset = params["s2"].to(torch.int32), params["offset"].to(torch.int32)
        product = self.groups(codes).to(torch.int32) * s2[..., None]
        require((s2 >= 1) & (s2 <= 16), "1 <= s2 <= 16")
        require((offset >= 128 - PROTECTIVE_MAX) & (offset <= 128 + PROTECTIVE_MAX), "9 <= offset <= 247")
        require((product >= 0) & (product <= 240), "0 <= Q4*s2 <= 240")
        require(product + offset[..., None] <= 255, "0 <= Q4*s2 + offset <= 255")
