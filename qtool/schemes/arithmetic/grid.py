"""The affine grid of a quantized group, which is all that rounding methods see of a scheme."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Grid:
    """The representable values of each group: ``step * code + offset``, ``low <= code <= high``.

    All four are ``[N, G]``; ``step`` and ``offset`` float32, ``low`` and ``high`` int32. Any code
    inside the bounds satisfies the scheme's overflow invariants.
    """

    step: Tensor
    offset: Tensor
    low: Tensor
    high: Tensor

    def nearest(self, weight: Tensor) -> Tensor:
        """Codes (float32, integral) of ``weight [N, G, g]`` nearest to it on the grid."""
        codes = torch.round((weight - self.offset[..., None]) / self.step[..., None])
        return codes.clamp(self.low[..., None], self.high[..., None])

    def value(self, codes: Tensor) -> Tensor:
        """Values (float32) of ``codes [N, G, g]``."""
        return codes * self.step[..., None] + self.offset[..., None]
