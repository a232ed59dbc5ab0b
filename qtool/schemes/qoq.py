"""w4a8-qoq: QoQ per channel, asymmetric 4-bit weights under 8-bit activations.

The zero point is subtracted in the epilogue.

QServe section 3 and appendix C.0.1. Per output channel, with a range that includes zero:

    s1 = (max - min) / 15    z = clamp(rne(-min / s1), 0, 15)    Q = clamp(rne(W / s1) + z, 0, 15)
    Y = (sum_k Qx * Q - z[n] * sum_k Qx) * sx[m] * s1[n]

The token sum is exact, ``sx * sum_k Qx``, so Y is the product of the quantized operands.
QServe replaces it by ``sum_k X`` of the unquantized input (equation 13). The activation's rounding
error then meets the codes 0..15 instead of the smaller Q - z, and the activation part of Y's error
is 3.5 times larger (0.031 against 0.0087 of Y for Gaussian data, K = 4096).
"""

import torch
from torch import Tensor

from qtool.schemes.arithmetic.activation import PER_TOKEN_S8
from qtool.schemes.arithmetic.products import int_matmul, scaled
from qtool.schemes.base import ClipRatio, Grid, Params, Scheme, clip_ratio, require, stored_scale

#: the least clipped step, in unclipped steps, so that a range does not vanish
LEAST_WIDTH = 2.0**-4


class QoQ(Scheme):
    """Parameters: ``s1 [N]`` scale, ``zero [N]`` u8 in 0..15."""

    name = "w4a8-qoq"
    code_bits = 4
    signed = False
    group_sizes = (None,)
    default_group_size = None
    activation = PER_TOKEN_S8

    def fit_range(
        self, low: Tensor, high: Tensor, *, clip: ClipRatio = 1.0, group_clip: ClipRatio = 1.0
    ) -> Params:
        ratio = clip_ratio(clip, group_clip)
        low, high = (low.clamp_max(0) * ratio)[:, 0], (high.clamp_min(0) * ratio)[:, 0]
        width = high / 15 - low / 15  # divided first: the difference may overflow
        scale = stored_scale(torch.where(width > 0, width, 1.0), self.scale_dtype)
        zero = torch.round(-low / scale.float()).clamp(0, 15)
        return {"s1": scale, "zero": zero.to(torch.uint8)}

    def clip_bounds(self, params: Params) -> Tensor:
        low = -params["zero"].float()[:, None]
        return torch.stack([low, low + 15])

    def with_clip_bounds(self, params: Params, bounds: Tensor) -> Params:
        low, high = bounds[0, :, 0].clamp_max(0), bounds[1, :, 0].clamp_min(0)
        width = ((high - low) / 15).clamp_min(LEAST_WIDTH)
        scale = stored_scale(params["s1"].float() * width, self.scale_dtype)
        return params | {
            "s1": scale,
            "zero": torch.round(-low / width).clamp(0, 15).to(torch.uint8),
        }

    def grid(self, params: Params) -> Grid:
        step = params["s1"].float()[:, None]
        bound = torch.zeros_like(step, dtype=torch.int32)
        return Grid(step, -step * params["zero"].float()[:, None], bound, bound + 15)

    def round_groups(self, groups: Tensor, params: Params) -> Tensor:
        codes = (groups / params["s1"].float()[:, None, None]).round_()
        return codes.add_(params["zero"].float()[:, None, None]).clamp_(0, 15)

    def dequantize(self, codes: Tensor, params: Params) -> Tensor:
        steps = codes.to(torch.float32, copy=True).sub_(params["zero"].float()[:, None])
        return steps.mul_(params["s1"].float()[:, None])

    def matmul(
        self, x: Tensor, codes: Tensor, params: Params, bias: Tensor | None = None
    ) -> Tensor:
        qx, sx = self.activation.quantize(x)
        token_sum = qx.sum(1, keepdim=True, dtype=torch.int32)  # [M, 1]
        steps = int_matmul(qx, codes.to(torch.int8)) - token_sum * params["zero"].to(torch.int32)
        return scaled(steps, sx, params["s1"], bias)

    def check_range(self, low: Tensor, high: Tensor, params: Params) -> None:
        require(params["zero"] <= 15, "0 <= zero <= 15")
        super().check_range(low, high, params)
