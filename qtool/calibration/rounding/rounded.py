"""A rounded linear before it is packed: its codes, and a module that computes with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtool.schemes.arithmetic.activation import PER_TOKEN_S8, Activation
from qtool.schemes.arithmetic.online_hadamard import rotate_fast
from qtool.schemes.base import Params, Scheme


@dataclass
class Rounded:
    """The outcome of rounding one linear: codes ``[N, K]`` and the scheme's parameters.

    ``weight_error`` is ``||W - V|| / ||W||`` if it was computed. A run shows it, unless the
    rounding has notes of its own (``block.notes``) without it.
    """

    codes: Tensor
    params: Params
    weight_error: float | None = None


def weight_errors(rounded: Mapping[str, Rounded]) -> dict[str, dict[str, float]]:
    """Notes on those of the linears ``rounded`` whose ``weight_error`` was computed, by linear."""
    return {
        name: {"weight_error": one.weight_error}
        for name, one in rounded.items()
        if one.weight_error is not None
    }


def stacked(scheme: Scheme, parts: Sequence[Rounded]) -> tuple[Tensor, Params]:
    """Codes ``[S N, K]`` and parameters of S linears, stacked as if they were one linear.

    The linears share the parameters that the scheme's output channels share.
    """
    codes = torch.cat([part.codes for part in parts]) if len(parts) > 1 else parts[0].codes
    return codes, scheme.stacked_params([part.params for part in parts])


def arranged(x: Tensor, permutation: Tensor | None, rotated: bool) -> Tensor:
    """``x [..., K]`` as the columns of a linear expect it: gathered, then rotated."""
    if permutation is not None:
        x = x.index_select(-1, permutation)
    return rotate_fast(x) if rotated else x


class SimulatedLinear(nn.Module):
    """Computes as the quantized linear will, on any device.

    It multiplies dequantized numbers. A CPU multiplies the integers themselves where each token and
    output channel has one scale: 8-bit products are several times as fast, and their sums exact.

    Args:
        linear: the linear that it replaces, for its bias.
        rounded: its codes and parameters.
        weight: the dequantized weight ``[N, K]``.
        permutation: the order ``[K]`` in which the input is gathered; None: it is not.
        rotated: whether the input is rotated after that.
    """

    def __init__(
        self,
        linear: nn.Linear,
        scheme: Scheme,
        rounded: Rounded,
        weight: Tensor,
        permutation: Tensor | None = None,
        rotated: bool = False,
    ) -> None:
        super().__init__()
        self.scheme, self.params = scheme, rounded.params
        in_integers = scheme.input_quantizer == PER_TOKEN_S8 and not weight.is_cuda
        self.codes = rounded.codes if in_integers else None
        self.permutation, self.rotated = permutation, rotated
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias

    @property
    def activation(self) -> Activation | None:
        """The quantizer of the (rotated) input; None if it is gathered or parameters matter."""
        return self.scheme.input_quantizer if self.permutation is None else None

    def forward(self, x: Tensor) -> Tensor:
        x = arranged(x, self.permutation, self.rotated)
        if self.codes is None:
            x = self.scheme.fake_activation(x, self.params)
            return nn.functional.linear(x, self.weight, self.bias)
        y = self.scheme.matmul(x.flatten(0, -2), self.codes, self.params, self.bias)
        return y.to(x.dtype).view(*x.shape[:-1], y.shape[-1])
