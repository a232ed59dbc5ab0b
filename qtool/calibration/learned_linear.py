"""A linear whose quantized weight can be learned: the straight-through estimator over a scheme's grid.

Forward is what the quantized linear computes, codes and all: ``V = grid(scale e^r).nearest(W)``. Backward
passes rounding as if it were not there (APEX4 section 3.3, LSQ arXiv 1902.08153 for the scale):

    dV/dW = 1 where the code is not clamped, else 0        dV/dr = V - W dV/dW

so the second moves the scale and, where codes are clamped, the clipping bound. The input goes through
the scheme's activation quantizer with gradient 1.

Legend: M tokens, N output channels, K input channels, G groups, g channels of a group.
"""

from typing import Any

import torch
from torch import Tensor, nn

from qtool.calibration.rounded import Rounded
from qtool.calibration.scales import float_scale
from qtool.schemes.base import Params, Scheme, stored_scale

#: a learned weight starts at most this far from its code, in steps: below 1/2, so that it has that code
START_WITHIN = 0.45


class LearnedLinear(nn.Module):
    """Stands in for a linear while its block is distilled.

    Attributes:
        weight: float32 ``[N, K]``, starts as near to the linear's as ``start``'s codes allow.
        log_ratio: logarithm of the change of the float scale, of its shape; starts at zero.
    """

    def __init__(self, linear: nn.Linear, scheme: Scheme, start: Rounded, permutation: Tensor | None) -> None:
        super().__init__()
        self.scheme, self.params, self.permutation = scheme, start.params, permutation
        self.bias, self.dtype = linear.bias, linear.weight.dtype
        value = scheme.groups(scheme.dequantize(start.codes, start.params))  # [N, G, g]
        #: what the scheme's sparsity left out stays out
        self.keep = None if scheme.sparsity is None else value != 0
        reach = START_WITHIN * scheme.grid(start.params).step[..., None]
        change = scheme.groups(linear.weight.detach().float()) - value
        weight = value + torch.minimum(torch.maximum(change, -reach), reach)
        self.weight = nn.Parameter(weight if self.keep is None else weight * self.keep)
        self.scale = float_scale(start.params)
        self.log_ratio = nn.Parameter(torch.zeros_like(start.params[self.scale], dtype=torch.float32))

    def now(self) -> Params:
        """The parameters with the scale as learned so far, as it would be stored."""
        scale = self.params[self.scale]
        return self.params | {self.scale: stored_scale(scale.float() * self.log_ratio.detach().exp(), scale.dtype)}

    def rounded(self) -> Rounded:
        """The codes and parameters learned so far."""
        params = self.now()
        codes = self.scheme.grid(params).nearest(self.weight.detach()).flatten(1)
        return Rounded(codes.to(self.scheme.code_dtype), params)

    def forward(self, x: Tensor) -> Tensor:
        if self.permutation is not None:
            x = x[..., self.permutation]
        params = self.now()
        x = x + (self.scheme.fake_activation(x.detach(), params) - x.detach())
        grid = self.scheme.grid(params)
        weight = _StraightThrough.apply(self.weight, self.log_ratio, self.keep, grid)
        return nn.functional.linear(x, weight.flatten(1).to(self.dtype), self.bias)


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, log_ratio: Tensor, keep: Tensor | None, grid: Any) -> Tensor:
        value = grid.value(grid.nearest(weight))
        lowest, highest = grid.value(grid.low[..., None] - 0.5), grid.value(grid.high[..., None] + 0.5)
        inside = (weight >= lowest) & (weight <= highest)
        ctx.save_for_backward(weight, value, inside if keep is None else inside & keep)
        ctx.scale_shape = log_ratio.shape
        return value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, value, inside = ctx.saved_tensors
        to_weight = gradients[0] * inside
        to_ratio = (gradients[0] * value - to_weight * weight).flatten(1).view(*_rows(ctx.scale_shape), -1).sum(-1)
        return to_weight, to_ratio.view(ctx.scale_shape), None, None


def _rows(shape: torch.Size) -> tuple[int, int]:
    return shape[0], shape[1] if len(shape) == 2 else 1
