"""w4a16: MARLIN, symmetric 4-bit weights under 16-bit activations.

MARLIN sections 3.4 and 3.5. Per group of g input channels, or per output channel:

    s = max|W| / 7.5    Q = clamp(rne(W / s) + 8, 0, 15)    W' = (Q - 8) * s    Y = X W'^T

The paper gives no scale; MARLIN's own quantizer divides by 7.5 (``s *= 2 / maxq``), so that the
sixteen codes cover -max..max and no weight is more than half a step from its code: +max and -max
fall on 7.5 and are rounded to 7 and -8. Dividing by 7 would leave code 0 unused.

On a CPU a linear rounds ``W'`` to the dtype of X before the product, as transformers does. Of the
kernels some do so for many tokens in groups, the others never.

A scale below 0 is legal, for codes reach a step further down than up: AutoRound gives a group whose
largest weight is positive ``s = -max W / 8``, so that the largest is code 0 (its
``quant_tensor_sym``), and imports keep that. The paper has none; GPTQ's search by group tries both
signs where asked (``negative_scales``).
"""

from torch import Tensor

from qtool.schemes.arithmetic.activation import UNQUANTIZED
from qtool.schemes.arithmetic.symmetric import Symmetric
from qtool.schemes.base import Params


class Marlin(Symmetric):
    """Parameters: ``scale [N, G]``."""

    name = "w4a16"
    code_bits = 4
    signed = False
    group_sizes = (32, 64, 128, None)
    default_group_size = 128
    activation = UNQUANTIZED
    divisor, zero, low, high = 7.5, 8, 0, 15
    negative_scales = True

    def matmul(
        self, x: Tensor, codes: Tensor, params: Params, bias: Tensor | None = None
    ) -> Tensor:
        y = x.float() @ self.dequantize(codes, params).t()
        return y if bias is None else y + bias.float()
