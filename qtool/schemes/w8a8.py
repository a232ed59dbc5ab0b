"""w8a8: the SmoothQuant baseline, s8 weights per output channel and s8 activations per token.

SmoothQuant (arXiv 2211.10438) section 3; QServe table 2 quotes it as the W8A8 row:

    s = max|W| / 127    Q = clamp(rne(W / s), -127, 127)    Y = (sum_k Qx * Q) * sx[m] * s[n]
"""

from torch import Tensor

from qtool.schemes.arithmetic.activation import PER_TOKEN_S8
from qtool.schemes.arithmetic.products import int_matmul, scaled
from qtool.schemes.arithmetic.symmetric import Symmetric
from qtool.schemes.base import Params


class SmoothQuant(Symmetric):
    """Parameters: ``scale [N, 1]``."""

    name = "w8a8"
    code_bits = 8
    signed = True
    group_sizes = (None,)
    default_group_size = None
    activation = PER_TOKEN_S8
    divisor, low, high = 127, -127, 127

    def matmul(
        self, x: Tensor, codes: Tensor, params: Params, bias: Tensor | None = None
    ) -> Tensor:
        qx, sx = self.activation.quantize(x)
        return scaled(int_matmul(qx, codes), sx, params["scale"][:, 0], bias)
