"""Symmetric one-level quantization, which W8A8, W4A16, W4A4 and FMPQ weights share.

Per group: ``s = max|W| / divisor``, ``Q = clamp(rne(W / s), low, high) + zero``, and the value is
``(Q - zero) * s``.
A scheme states four constants. A group of zeros gets scale 1.
"""

from typing import ClassVar

import torch
from torch import Tensor

from qtool.schemes.base import ClipRatio, Grid, Params, Scheme, clip_ratio, stored_scale


class Symmetric(Scheme):
    """Parameters: ``scale [N, G]``."""

    #: max|W| of a group, in steps
    divisor: ClassVar[float]
    #: the code of the value zero
    zero: ClassVar[int] = 0
    #: legal codes, ``zero`` included
    low: ClassVar[int]
    high: ClassVar[int]

    def fit_range(
        self, low: Tensor, high: Tensor, *, clip: ClipRatio = 1.0, group_clip: ClipRatio = 1.0
    ) -> Params:
        amax = torch.maximum(low.abs(), high.abs()) * clip_ratio(clip, group_clip)
        scale = stored_scale(
            torch.where(amax != 0, amax.abs() / self.divisor, 1.0), self.scale_dtype
        )
        # a ratio below 0 asks for a scale below 0
        return {"scale": torch.where(amax < 0, -scale, scale)}

    def grid(self, params: Params) -> Grid:
        step = params["scale"].float()
        low, high = (
            torch.full_like(step, code, dtype=torch.int32) for code in (self.low, self.high)
        )
        return Grid(step, -self.zero * step, low, high)

    def round_groups(self, groups: Tensor, params: Params) -> Tensor:
        codes = (groups / params["scale"].float()[..., None]).round_()
        return codes.add_(self.zero).clamp_(self.low, self.high)

    def dequantize(self, codes: Tensor, params: Params) -> Tensor:
        values = self.groups(codes).to(torch.float32, copy=True).sub_(self.zero)
        return values.mul_(params["scale"].float()[..., None]).flatten(1)
