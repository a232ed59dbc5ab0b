"""A rounded linear before it is packed: its codes, and a module that computes with them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtool.errors import CheckFailed, QtoolError, checking
from qtool.format import LinearFormat
from qtool.schemes.arithmetic.activation import Activation
from qtool.schemes.arithmetic.online_hadamard import rotate_fast
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
    """Codes ``[S N, K]`` and parameters of S linears, stacked as if they were one linear.

    The linears share the parameters that the scheme's output channels share.
    """
    codes = torch.cat([part.codes for part in parts]) if len(parts) > 1 else parts[0].codes
    return codes, scheme.stacked_params([part.params for part in parts])


def check(scheme: Scheme, linears: Mapping[str, Rounded]) -> None:
    """:meth:`Scheme.check` for several linears of one shape at once.

    Raises:
        CheckFailed: names the linear.
    """
    try:
        scheme.check(*stacked(scheme, [*linears.values()]))
    except CheckFailed:
        for name, rounded in linears.items():
            with checking(name):
                scheme.check(rounded.codes, rounded.params)
        raise


def require_packable(
    rounding: str,
    found: Any,
    formats: Mapping[str, LinearFormat],
    shapes: Mapping[str, tuple[int, int]],
) -> None:
    """Refuse the result of a method ``rounding`` unless ``formats`` can pack it.

    Args:
        found: the result of its ``round``: a :class:`Rounded` for each linear of ``formats``.
        shapes: ``(N, K)`` of the linears.

    Raises:
        QtoolError: names the linear, what was found and what is expected.
    """
    if not isinstance(found, Mapping):
        raise QtoolError(
            f"{rounding}: round returns {type(found).__name__}; a Rounded for each linear is"
            " expected"
        )
    for name in sorted(formats.keys() - found.keys()):
        raise QtoolError(f"{rounding}: round returns nothing for {name}, which is to be quantized")
    for name in sorted(found.keys() - formats.keys()):
        raise QtoolError(f"{rounding}: round returns {name!r}, which is not to be quantized")
    for name, linear_format in formats.items():
        one, (n, k) = found[name], shapes[name]
        if not isinstance(one, Rounded):
            raise QtoolError(
                f"{rounding}: round returns {type(one).__name__} for {name}; a Rounded is expected"
            )
        codes = torch.empty(n, k, dtype=linear_format.scheme_object.code_dtype, device="meta")
        if not isinstance(one.params, Mapping):
            raise QtoolError(
                f"{rounding}: round returns {type(one.params).__name__} for the parameters of"
                f" {name}; a tensor for each of them is expected"
            )
        given = _described({"codes": one.codes, **one.params})
        expected = _described({"codes": codes, **linear_format.parameters(n, k)})
        if given != expected:
            raise QtoolError(
                f"{rounding}: round returns {', '.join(given)} for {name}; expected are"
                f" {', '.join(expected)}"
            )


def _described(tensors: Mapping[str, Any]) -> list[str]:
    """A text with name, dtype and shape for each tensor, sorted by name."""
    return [
        f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
        if isinstance(t, Tensor)
        else f"{name} {type(t).__name__}"
        for name, t in sorted(tensors.items())
    ]


def arranged(x: Tensor, permutation: Tensor | None, rotated: bool) -> Tensor:
    """``x [..., K]`` as the columns of a linear expect it: gathered, then rotated."""
    if permutation is not None:
        x = x[..., permutation]
    return rotate_fast(x) if rotated else x


class SimulatedLinear(nn.Module):
    """Computes as the quantized linear will, with dequantized numbers and on any device.

    Args:
        linear: the linear that it replaces.
        weight: the dequantized weight ``[N, K]``.
    """

    def __init__(
        self,
        linear: nn.Linear,
        scheme: Scheme,
        params: Params,
        weight: Tensor,
        permutation: Tensor | None = None,
        rotated: bool = False,
    ) -> None:
        super().__init__()
        self.scheme, self.params = scheme, params
        self.permutation, self.rotated = permutation, rotated
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias

    @property
    def activation(self) -> Activation | None:
        """The quantizer of the (rotated) input; None if it is gathered or parameters matter."""
        return self.scheme.input_quantizer if self.permutation is None else None

    def forward(self, x: Tensor) -> Tensor:
        x = arranged(x, self.permutation, self.rotated)
        return nn.functional.linear(
            self.scheme.fake_activation(x, self.params), self.weight, self.bias
        )
