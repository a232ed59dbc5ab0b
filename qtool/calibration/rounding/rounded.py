"""A rounded linear before it is packed: its codes, and a module that computes with them."""

from dataclasses import dataclass

from torch import Tensor, nn

from qtool.schemes.arithmetic.activation import Activation
from qtool.schemes.base import Params, Scheme


@dataclass
class Rounded:
    """The outcome of rounding one linear: codes ``[N, K]`` and the scheme's parameters.

    ``weight_error`` is ``||W - V|| / ||W||`` if it was computed.
    """

    codes: Tensor
    params: Params
    weight_error: float | None = None


class SimulatedLinear(nn.Module):
    """Computes as the quantized linear will, on dequantized numbers and on any device."""

    def __init__(
        self, linear: nn.Linear, scheme: Scheme, rounded: Rounded, permutation: Tensor | None
    ) -> None:
        super().__init__()
        self.scheme, self.params, self.permutation = scheme, rounded.params, permutation
        weight = scheme.dequantize(rounded.codes, rounded.params).to(linear.weight.dtype)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias

    @property
    def activation(self) -> Activation | None:
        """What quantizes the input; None where it is gathered first or parameters matter."""
        return self.scheme.input_quantizer if self.permutation is None else None

    def forward(self, x: Tensor) -> Tensor:
        if self.permutation is not None:
            x = x[..., self.permutation]
        return nn.functional.linear(
            self.scheme.fake_activation(x, self.params), self.weight, self.bias
        )
