"""w4a8-qoq-g128: QoQ progressive group quantization, 4-bit codes inside an 8-bit channel.

QServe sections 3.1 and 4.2.2. Level 1 is per output channel. Level 2 is per group, with a range
that includes zero (``lo = min(0, min Q8)``, ``hi = max(0, max Q8)``), since a one-sided group would
lose its zero point otherwise:

    s1 = max|W| / 119                            Q8 = clamp(rne(W / s1), -119, 119)
    s2 = clamp(rne((hi - lo) / 15), 1, 16)       z = clamp(rne(-lo / s2), 0, 15)
    Q4 = clamp(rne(Q8 / s2) + z, 0, 15)          Q8' = Q4 * s2 - z * s2
    Y = (sum_k Qx * Q8') * sx[m] * s1[n]

Rounding to nearest follows the paper: it rounds twice, first to Q8. QServe's own tool rounds once,
``Q4 = clamp(rne(W / (s1 * s2)) + z, 0, 15)``, which is half a percent nearer to normal weights.
GPTQ and distillation round once too, since they see only the grid ``(Q4 - z) * s2 * s1``.

The kernel multiplies and then subtracts, four bytes of a word at once, so ``Q4 * s2`` stays within
0..255 and Q8' within -128..127. Rounding to nearest from the protective range always satisfies
this; GPTQ may choose any code, so the grid's bounds exclude codes beyond it.
"""

import torch
from torch import Tensor

from qtool.schemes.base import ClipRatio, Grid, Params, require
from qtool.schemes.two_level import TwoLevel, fit_level1, quantize_level1


class ProgressiveQoQ(TwoLevel):
    """Parameters: ``s1 [N]`` scale, ``s2 [N, G]`` u8 in 1..16, ``zero [N, G]`` u8 in 0..15."""

    name = "w4a8-qoq-g128"
    default_group_size = 128
    largest_clip = 1.4  # a range of 1.49 * 15 codes gets s2 = 1

    def fit_range(
        self, low: Tensor, high: Tensor, *, clip: ClipRatio = 1.0, group_clip: ClipRatio = 1.0
    ) -> Params:
        s1 = fit_level1(low, high, clip, self.scale_dtype)
        low = torch.round(quantize_level1(low, s1).clamp_max(0) * group_clip)
        high = torch.round(quantize_level1(high, s1).clamp_min(0) * group_clip)
        return self.with_clip_bounds({"s1": s1}, torch.stack([low, high]))

    def clip_bounds(self, params: Params) -> Tensor:
        s2, zero = params["s2"].float(), params["zero"].float()
        return torch.stack([-zero * s2, (15 - zero) * s2])

    def with_clip_bounds(self, params: Params, bounds: Tensor) -> Params:
        low, high = bounds[0].clamp_max(0), bounds[1].clamp_min(0)
        s2 = torch.round((high - low) / 15).clamp(1, 16)
        zero = torch.round(-low / s2).clamp(0, 15)
        return params | {"s2": s2.to(torch.uint8), "zero": zero.to(torch.uint8)}

    def grid(self, params: Params) -> Grid:
        s1 = params["s1"].float()[:, None]
        s2, zero = params["s2"].to(torch.int32), params["zero"].to(torch.int32)
        low = (zero - torch.div(128, s2, rounding_mode="floor")).clamp(0, 15)
        high = (zero + torch.div(127, s2, rounding_mode="floor")).clamp(0, 15)
        return Grid(s1 * s2, -s1 * (s2 * zero), low, high)

    def round_groups(self, groups: Tensor, params: Params) -> Tensor:
        steps = quantize_level1(groups, params["s1"]).div_(params["s2"].float()[..., None]).round_()
        return steps.add_(params["zero"].float()[..., None]).clamp_(0, 15)

    def exact_level2(self, codes: Tensor, params: Params) -> Tensor:
        steps = (
            self.groups(codes).to(torch.float32, copy=True).sub_(params["zero"].float()[..., None])
        )
        return steps.mul_(params["s2"].float()[..., None]).flatten(1)

    def check_range(self, low: Tensor, high: Tensor, params: Params) -> None:
        s2, zero = params["s2"].to(torch.int32), params["zero"].to(torch.int32)
        require((s2 >= 1) & (s2 <= 16), "1 <= s2 <= 16")
        require(zero <= 15, "0 <= zero <= 15")
        require((low * s2 >= 0) & (high * s2 <= 255), "0 <= Q4*s2 <= 255")
        require(
            ((low - zero) * s2 >= -128) & ((high - zero) * s2 <= 127), "-128 <= (Q4 - z)*s2 <= 127"
        )
        super().check_range(low, high, params)
