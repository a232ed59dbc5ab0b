"""w4a4: APEX4, symmetric 4-bit weights and activations, no zero points, no 8-bit fallback.

APEX4 section 3.2.1, equations 7 and 8. Weight and activation of a layer share the group size G:

    s = max|.| / 7    Q = clamp(rne(. / s), -8, 7)    Y = sum_G (sum_k Qx * Q) * sx[m, G] * s[n, G]

Uniform G = 128 is ``w4a4-g128``; G = 32 for v_proj and down_proj and per channel elsewhere is
``w4a4-mix`` (section 3.2.2), a matter of the recipe.
"""

import torch
from torch import Tensor

from qtool.schemes.arithmetic.activation import Activation
from qtool.schemes.arithmetic.products import group_matmul
from qtool.schemes.arithmetic.symmetric import Symmetric
from qtool.schemes.base import GroupSize, Params


class Apex4(Symmetric):
    """Parameters: ``scale [N, G]``."""

    name = "w4a4"
    code_bits = 4
    signed = True
    group_sizes = (32, 64, 128, 256, 512, 1024, None)
    default_group_size = 128
    divisor, low, high = 7, -8, 7

    def __init__(
        self, group_size: GroupSize = "default", scale_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(group_size, scale_dtype)
        self.activation = Activation(4, self.group_size)

    def matmul(
        self, x: Tensor, codes: Tensor, params: Params, bias: Tensor | None = None
    ) -> Tensor:
        qx, sx = self.activation.quantize(x)
        return group_matmul(qx, sx, codes, params["scale"].float(), self.group_size, bias)
