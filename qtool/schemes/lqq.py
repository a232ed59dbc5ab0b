"""w4a8-lqq: LiquidQuant, a two-level W4A8 scheme whose dequantization is one IMAD and one XOR.

LiquidGEMM section 4. Per output channel, then per group of g input channels:

    s1 = max|W| / 119                Q8 = clamp(rne(W / s1), -119, 119)
    lo = min Q8  s2 = clamp(rne((max Q8 - lo) / 15), 1, 16)   Q4 = clamp(rne((Q8 - lo) / s2), 0, 15)
    a = 128 + lo                     Q8' = (Q4 * s2 + a) XOR 0x80 = Q4 * s2 + lo

The sum ``Q4 * s2 + a`` never leaves 0..255, so four bytes of a word are dequantized at once:
``Q4 * s2 + lo`` is at most max Q8 + 7.5, and level 1 keeps max Q8 below 120.
"""

import torch
from torch import Tensor

from qtool.schemes import lqq_triton
from qtool.schemes.arithmetic.launch_triton import triton_runs_on
from qtool.schemes.base import ClipRatio, Grid, Params, require
from qtool.schemes.two_level import PROTECTIVE_MAX, TwoLevel, fit_level1, quantize_level1


class LiquidQuant(TwoLevel):
    """Parameters: ``s1 [N]`` scale, ``s2 [N, G]`` and ``offset [N, G]`` u8.

    ``s2`` is in 1..16, ``offset`` is ``a = 128 + lo``.
    """

    name = "w4a8-lqq"
    default_group_size = 64

    def fit_range(
        self, low: Tensor, high: Tensor, *, clip: ClipRatio = 1.0, group_clip: ClipRatio = 1.0
    ) -> Params:
        if triton_runs_on(low):
            return lqq_triton.fit(low, high, clip, group_clip, self.scale_dtype)
        s1 = fit_level1(low, high, clip, self.scale_dtype)
        low = torch.round(quantize_level1(low, s1) * group_clip)
        high = torch.round(quantize_level1(high, s1) * group_clip)
        return self.with_clip_bounds({"s1": s1}, torch.stack([low, high]))

    def clip_bounds(self, params: Params) -> Tensor:
        low = params["offset"].float() - 128
        return torch.stack([low, low + 15 * params["s2"].float()])

    def with_clip_bounds(self, params: Params, bounds: Tensor) -> Params:
        low = bounds[0].round().clamp(-PROTECTIVE_MAX, PROTECTIVE_MAX)
        s2 = torch.round((bounds[1] - low) / 15).clamp(1, 16)
        return params | {"s2": s2.to(torch.uint8), "offset": (low + 128).to(torch.uint8)}

    def grid(self, params: Params) -> Grid:
        s1 = params["s1"].float()[:, None]
        s2 = params["s2"].float()
        low = params["offset"].float() - 128
        # s2 is at least 1, so the last codes of a narrow group near 119 would lie above 127
        legal = torch.div(127 - low, s2, rounding_mode="floor").clamp_max(15).to(torch.int32)
        return Grid(s1 * s2, s1 * low, torch.zeros_like(legal), legal)

    def round_groups(self, groups: Tensor, params: Params) -> Tensor:
        q8 = quantize_level1(groups, params["s1"])
        q8.sub_(params["offset"].float()[..., None] - 128)
        return q8.div_(params["s2"].float()[..., None]).round_().clamp_(0, 15)

    def exact_level2(self, codes: Tensor, params: Params) -> Tensor:
        q8 = self.groups(codes).to(torch.float32, copy=True).mul_(params["s2"].float()[..., None])
        return q8.add_(params["offset"].float()[..., None] - 128).flatten(1)

    def fake_weight(self, weight: Tensor, params: Params) -> Tensor:
        if triton_runs_on(weight):
            return lqq_triton.fake(weight, params, less=False)
        return super().fake_weight(weight, params)

    def weight_error(self, weight: Tensor, params: Params) -> Tensor:
        if triton_runs_on(weight):
            return lqq_triton.fake(weight, params, less=True)
        return super().weight_error(weight, params)

    def check_range(self, low: Tensor, high: Tensor, params: Params) -> None:
        s2, offset = params["s2"].to(torch.int32), params["offset"].to(torch.int32)
        require((s2 >= 1) & (s2 <= 16), "1 <= s2 <= 16")
        require((offset - 128).abs() <= PROTECTIVE_MAX, "9 <= offset <= 247")
        require((low * s2 >= 0) & (high * s2 <= 240), "0 <= Q4*s2 <= 240")
        require(high * s2 + offset <= 255, "0 <= Q4*s2 + offset <= 255")
        super().check_range(low, high, params)
