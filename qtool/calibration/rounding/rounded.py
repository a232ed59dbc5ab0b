"""A rounded linear before it is packed: its codes, and a module that computes with them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
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


def stacked(scheme: Scheme, parts: Sequence[Rounded]) -> tuple[Tensor, Params]:
    """Codes ``[S N, K]`` and parameters of S linears, as those of one; a single one's as they are.

    They share the parameters that the scheme's output channels share.
    """
    codes = torch.cat([part.codes for part in parts]) if len(parts) > 1 else parts[0].codes
    return codes, scheme.stacked_params([part.params for part in parts])


class SimulatedLinear(nn.Module):
    """Computes as the quantized linear will, on dequantized numbers and on any device.

    Args:
        linear: it takes its place. weight: the dequantized one ``[N, K]``.
    """

    def __init__(
        self,
        linear: nn.Linear,
        scheme: Scheme,
        params: Params,
        weight: Tensor,
        permutation: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.scheme, self.params, self.permutation = scheme, params, permutation
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
