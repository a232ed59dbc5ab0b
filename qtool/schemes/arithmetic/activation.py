"""Dynamic activation quantization: symmetric integers with one scale per token or token group.

Per-token s8 (W8A8, W4A8): ``sx[m] = max_k |X[m, k]| / 127``, ``Qx = rne(X / sx)``.
Per-token-group s4 (W4A4, FMPQ): ``sx[m, G] = max |X| / 7`` (APEX4, eq. 7, whose clamp to -8..7
a dynamic scale never meets).
A group of zeros gets scale 1. All arithmetic in float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.schemes.arithmetic import activation_triton


@dataclass(frozen=True)
class Activation:
    """The run-time quantization of a linear's input.

    Args:
        bits: 16 (left as it is), or 2 to 8; the built-in schemes have 16, 8 and 4.
        group_size: input channels per scale; ``None`` means one scale per token.

    Raises:
        QtoolError: other bits, which int8 codes do not hold.
    """

    bits: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        if self.bits != 16 and self.bits not in range(2, 9):
            raise QtoolError(f"activation: bits is {self.bits!r}; 16, or 2 to 8, is expected")

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Codes int8 ``[..., K]`` and scales float32 ``[..., K / group_size]`` of ``x``."""
        return quantize_groups(x, self.group_size or x.shape[-1], 2 ** (self.bits - 1) - 1)

    def dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The float32 values ``[..., K]`` of codes and scales."""
        return dequantize_groups(codes, scale)

    def fake(self, x: Tensor) -> Tensor:
        """``x`` quantized and dequantized, in its own dtype."""
        if self.bits == 16:
            return x
        return fake_groups(x, self.group_size or x.shape[-1], 2 ** (self.bits - 1) - 1)


def fake_groups(x: Tensor, size: int, top: Tensor | int) -> Tensor:
    """``x [..., K]`` quantized as by :func:`quantize_groups` and dequantized, in its own dtype."""
    if activation_triton.runs_on(x, size) and x.numel() and not x.shape[-1] % size:
        return activation_triton.fake(x, size, top)
    codes, scale = quantize_groups(x, size, top)
    return dequantize_groups(codes, scale).to(x.dtype)


def dequantize_groups(codes: Tensor, scale: Tensor) -> Tensor:
    """The float32 values ``[..., K]`` of codes and scales ``[..., G]``."""
    return (codes.float().unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]).flatten(-2)


def quantize_groups(x: Tensor, size: int, top: Tensor | int) -> tuple[Tensor, Tensor]:
    """Codes int8 ``[..., K]`` and scales float32 ``[..., G]`` of groups of ``size`` channels.

    ``top``, the largest code, may differ by group (``[G]``).

    Raises:
        QtoolError: if K is not a multiple of ``size``.
    """
    if x.shape[-1] % size:
        raise QtoolError(
            f"activation: {x.shape[-1]} input channels are not divisible by group size {size}"
        )
    groups = x.float().unflatten(-1, (-1, size))  # [..., G, g]
    amax = groups.abs().amax(-1)
    if not isinstance(top, Tensor):
        top = amax.new_full((), top)  # by a number, a GPU multiplies by its reciprocal
    # a subnormal amax / top would have too few bits, or none
    scale = torch.where(amax > 0, amax / top, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
    # within -top..top: the scale comes from this very group
    codes = (groups / scale[..., None]).round_()
    return codes.flatten(-2).to(torch.int8), scale


PER_TOKEN_S8 = Activation(8)
UNQUANTIZED = Activation(16)
