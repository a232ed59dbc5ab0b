"""A linear that learns its quantized weight through a straight-through estimator.

Forward computes what the quantized linear does, with ``V = grid.nearest(W)``. Backward lets
gradients pass through the rounding as if it were not there (APEX4 section 3.3). If the grid is
scaled by a and shifted by b,

    dV/dW = 1 where the code is not clamped, else 0
    dV/da = V - W dV/dW        dV/db = 1 - dV/dW

(LSQ arXiv 1902.08153 for the scale, LSQ+ arXiv 2004.09576 for the shift). A scheme without zero
points has one unknown, the logarithm r of its float scale's change, ``a = e^r``: both clipping
bounds move together. A scheme with zero points (:meth:`Scheme.clip_bounds`) also learns the lowest
and the highest value of each group, L and H, as OmniQuant's gamma and beta (arXiv 2308.13137,
equation 2); its integer parameters are those nearest to L and H:

    a = e^r (H - L) / (H_0 - L_0)        b = e^r L - a L_0

The input goes through the scheme's activation quantizer with gradient 1.

Legend: M tokens, N output channels, K input channels, G groups, g channels of a group.
"""

from typing import Any

import torch
from torch import Tensor, nn

from qtool.calibration.rounding.distill import straight_through_triton
from qtool.calibration.rounding.rounded import Rounded, arranged
from qtool.calibration.rounding.scales import float_scale
from qtool.schemes.arithmetic.launch_triton import triton_runs_on
from qtool.schemes.base import Grid, Params, Scheme, stored_scale

#: a learned weight starts at most this many steps from the value of its code: below 1/2, so that it
#: still rounds to that code
START_WITHIN = 0.45


class LearnedLinear(nn.Module):
    """Replaces a linear while its block is distilled.

    Args:
        linear: the linear, for its bias and the dtype of its forward.
        start: the codes and parameters that learning starts from.
        weight: the exact weight ``[N, K]``, of which ``linear`` may hold a 16-bit copy.
        permutation: the order ``[K]`` in which the input is gathered; None: it is not.
        rotated: whether the input is rotated after it is gathered.

    Attributes:
        steps: the weight ``[N, G, g]`` divided by the step of its group's grid, float32; it starts
            as near to the exact weight as the codes of ``start`` allow. It is learned instead of
            the weight so that one learning rate suits all groups: outlier channels have steps a
            hundred times as large as others.
        log_ratio: logarithm of the change of the float scale, in the scale's shape; starts at 0.
        shift: ``[2, N, G]``, how far each group's bounds have moved, in shares of its width; starts
            at 0. None if the scheme has no bounds.
    """

    def __init__(
        self,
        linear: nn.Linear,
        scheme: Scheme,
        start: Rounded,
        weight: Tensor,
        permutation: Tensor | None = None,
        rotated: bool = False,
    ) -> None:
        super().__init__()
        self.scheme, self.params = scheme, start.params
        self.permutation, self.rotated = permutation, rotated
        self.bias, self.dtype = linear.bias, linear.weight.dtype
        value = scheme.groups(scheme.dequantize(start.codes, start.params))  # [N, G, g]
        #: False where the scheme's sparsity has zeros, which stay
        self.keep = None if scheme.sparsity is None else value != 0
        #: the step ``[N, G, 1]`` of the grid that learning starts from
        self.step = scheme.grid(start.params).step[..., None]
        reach = START_WITHIN * self.step
        exact = scheme.groups(weight.detach().float())
        near = value + (exact - value).clamp(-reach, reach)
        near = near if self.keep is None else near * self.keep
        self.steps = nn.Parameter(near / self.step)
        self.scale = float_scale(start.params)
        self.log_ratio = nn.Parameter(
            torch.zeros_like(start.params[self.scale], dtype=torch.float32)
        )
        bounds = scheme.clip_bounds(start.params)
        self.shift = None if bounds is None else nn.Parameter(torch.zeros_like(bounds))

    @property
    def weight(self) -> Tensor:
        """The weight as learned so far ``[N, G, g]``."""
        return self.steps * self.step

    def clip_bounds(self) -> Tensor | None:
        """The groups' bounds as learned so far ``[2, N, G]``, real, in units of the scale."""
        start = self.scheme.clip_bounds(self.params)
        if start is None or self.shift is None:
            return None
        return start + (start[1] - start[0]) * self.shift

    def learned_params(self) -> Params:
        """The parameters as learned so far, in the form in which they would be stored."""
        scale, bounds = self.params[self.scale], self.clip_bounds()
        params = self.params | {
            self.scale: stored_scale(scale.float() * self.log_ratio.detach().exp(), scale.dtype)
        }
        return params if bounds is None else self.scheme.with_clip_bounds(params, bounds.detach())

    def gain_and_shift(self) -> tuple[Tensor, Tensor | None]:
        """Tensors ``[N, G]`` or ``[N, 1]`` that take the gradients of a and b; b's may be None.

        Their values are not used. Without bounds the first is ``log a``, whose gradient is that of
        a, which is 1 here.
        """
        bounds = self.clip_bounds()
        if bounds is None:
            return self.log_ratio.view(len(self.steps), -1), None
        scale = self.params[self.scale].float() * self.log_ratio.exp()
        low, high = scale.view(len(self.steps), -1) * bounds
        gain = (high - low) / (high - low).detach()
        return gain, low - gain * low.detach()

    def rounded(self) -> Rounded:
        """The codes and parameters learned so far."""
        params = self.learned_params()
        codes = self.scheme.grid(params).nearest(self.weight.detach()).flatten(1)
        return Rounded(codes.to(self.scheme.code_dtype), params)

    def forward(self, x: Tensor) -> Tensor:
        x = arranged(x, self.permutation, self.rotated)
        params = self.learned_params()
        x = _Replaced.apply(x, self.scheme.fake_activation(x.detach(), params))
        grid = self.scheme.grid(params)
        weight = StraightThrough.apply(
            self.steps, self.step, *self.gain_and_shift(), self.keep, grid, self.dtype
        )
        return nn.functional.linear(x, weight, self.bias)


class _Replaced(torch.autograd.Function):
    """``value`` with the gradient of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], None


class StraightThrough(torch.autograd.Function):
    """The nearest grid values ``[N, K]`` of a weight ``steps * step``, with the gradients above.

    ``steps`` is ``[N, G, g]``, ``step`` broadcasts to it as ``[N, G, 1]``. ``gain`` is ``[N, G]``
    or ``[N, 1]``; ``shift`` has its shape or is None; ``keep`` is bool ``[N, G, g]`` or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        steps: Tensor,
        step: Tensor,
        gain: Tensor,
        shift: Tensor | None,
        keep: Tensor | None,
        grid: Grid,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(steps, step, keep)
        ctx.grid, ctx.per_group = grid, gain.shape
        if triton_runs_on(steps):
            return straight_through_triton.value(steps, step, grid, dtype).flatten(1)
        return grid.value(grid.nearest(steps * step)).flatten(1).to(dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        steps, step, keep = ctx.saved_tensors
        find = straight_through
        if triton_runs_on(steps):
            find = straight_through_triton.gradients
        gradient = gradients[0].view(steps.shape)
        to_steps, to_gain, to_shift = find(steps, step, keep, gradient, ctx.grid)
        to_gain = to_gain.view(*ctx.per_group, -1).sum(-1)
        shift_learns = ctx.needs_input_grad[3]
        return to_steps, None, to_gain, to_shift if shift_learns else None, None, None, None


def straight_through(
    steps: Tensor, step: Tensor, keep: Tensor | None, gradient: Tensor, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of steps, gain and shift from the ``gradient [N, G, g]`` of the values.

    The gradients of gain and shift are ``[N, G]``.
    """
    weight = steps * step
    lowest, highest = grid.value(grid.low[..., None] - 0.5), grid.value(grid.high[..., None] + 0.5)
    inside = (weight >= lowest) & (weight <= highest)
    to_weight = gradient.float() * (inside if keep is None else inside & keep)
    to_gain = gradient * grid.value(grid.nearest(weight)) - to_weight * weight
    return to_weight * step, to_gain.sum(-1), (gradient - to_weight).sum(-1)
