"""w4a16-pow2: 4-bit weights whose scales are powers of two, under 16-bit activations.

Per group of g input channels:

    s = 2^ceil(log2(max|W| / 7))    Q = clamp(rne(W / s), -7, 7)    W' = Q * s

so that multiplying by s only adds to an exponent. After ``pip install ./examples/own_scheme``:

    qtool quantize demo --scheme w4a16-pow2 --out demo-pow2
    qtool verify demo-pow2
    qtool eval demo --model demo-pow2 --compare demo
"""

import torch
from torch import Tensor

import qtool
from qtool.schemes import Grid, Params, Scheme
from qtool.schemes.arithmetic.activation import UNQUANTIZED
from qtool.schemes.base import ClipRatio, clip_ratio, stored_scale

LIMIT = 7


class PowerOfTwo(Scheme):
    """4-bit weights in groups with power-of-two scales, 16-bit activations.

    Parameters: ``scale [N, G]``.
    """

    name = "w4a16-pow2"
    code_bits = 4
    signed = True
    group_sizes = (32, 64, 128, None)
    default_group_size = 64
    activation = UNQUANTIZED

    def fit_range(
        self, low: Tensor, high: Tensor, *, clip: ClipRatio = 1.0, group_clip: ClipRatio = 1.0
    ) -> Params:
        largest = torch.maximum(low.abs(), high.abs()) * clip_ratio(clip, group_clip)
        step = torch.where(largest > 0, largest / LIMIT, 1.0)
        return {"scale": stored_scale(step.log2().ceil().exp2(), self.scale_dtype)}

    def grid(self, params: Params) -> Grid:
        step = params["scale"].float()
        bound = torch.full_like(step, LIMIT, dtype=torch.int32)
        return Grid(step, torch.zeros_like(step), -bound, bound)

    def round_groups(self, groups: Tensor, params: Params) -> Tensor:
        codes = (groups / params["scale"].float()[..., None]).round_()
        return codes.clamp_(-LIMIT, LIMIT)

    def dequantize(self, codes: Tensor, params: Params) -> Tensor:
        return (self.groups(codes).float() * params["scale"].float()[..., None]).flatten(1)

    def matmul(
        self, x: Tensor, codes: Tensor, params: Params, bias: Tensor | None = None
    ) -> Tensor:
        y = x.float() @ self.dequantize(codes, params).t()
        return y if bias is None else y + bias.float()


def register() -> None:
    """What the entry point names: qtool calls it once, before it looks anything up."""
    qtool.register_scheme(PowerOfTwo)
