"""``qtool::quantize_packed_groups``: an input's s4 codes as nibbles, for s4 tensor cores.

Blocks of 8 bits have s8 codes.

The numbers are those of :mod:`qtool.kernels.activation.quantize_activation_groups`, packed in the
same pass. Of each 32 inputs, in the order of the weight's layout, the first 16 codes are the low
nibbles of 16 bytes and the others the high ones. So a token's bytes have the order of a weight's in
that layout, and an s4 instruction multiplies the words of both.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.activation.arrangement import SPAN
from qtool.kernels.activation.quantize_activation_groups import QuantizeActivationGroups, definition
from qtool.kernels.build import ARCHS, Build
from qtool.kernels.op import operator
from qtool.schemes.fmpq import BLOCK

OP = "quantize_packed_groups"


def builds() -> Iterator[Build]:
    """Both layouts, with and without 8-bit blocks, rotated and not."""
    layouts = ("apex4", 1), ("w4ax-interleaved", 2)
    for arch, (layout, packed), rotated in product(ARCHS, layouts, (False, True)):
        source = definition(4096, torch.float16, "none", True, BLOCK, layout, packed, rotated)
        name = f"quantize_packed_groups {layout}" + " rotated" * rotated
        yield Build(name, arch, source, source[2]["THREADS"], calls=True)


class QuantizePackedGroups(QuantizeActivationGroups):
    """Codes uint8 ``[M, K/2]`` and scales float32 ``[G, M4]`` of an input.

    :func:`pack_tokens` states the order; with ``eight_bit`` the codes are ``[M, K]``, and a group
    is a block of 128. The arguments are those of :func:`quantize_activation_groups`, but
    ``arrangement`` is a weight's layout, ``apex4`` or ``w4ax-interleaved``.

    Raises:
        QtoolError: for a wrong dtype, shape, stride or device; one sentence.
    """

    def require(self, op: str = OP) -> None:
        if self.arrangement == "none" or (self.eight_bit is not None and self.group_size != BLOCK):
            raise QtoolError(
                f"{op}: layout {self.arrangement!r} and group size "
                f"{self.group_size}; expected a weight's layout, and {BLOCK} where some blocks "
                "have 8 bits"
            )
        super().require(op)

    def empty(self) -> tuple[Tensor, Tensor]:
        width = self.k // 2 if self.eight_bit is None else self.k
        codes = self.x.new_empty((self.x.shape[0], width), dtype=torch.uint8)
        return codes, self.empty_scale()

    def reference(self) -> tuple[Tensor, Tensor]:
        codes, scale = super().reference()
        return pack_tokens(codes, self.eight_bit), scale

    def launch(self, out: tuple[Tensor, Tensor]) -> None:
        self.launch_packed(out, 1 if self.eight_bit is None else 2)


quantize_packed_groups = operator(OP, QuantizePackedGroups)


def pack_tokens(codes: Tensor, eight_bit: Tensor | None) -> Tensor:
    """Codes int8 ``[M, K]`` in a layout's arrangement as nibbles, uint8 ``[M, K/2]``.

    With ``eight_bit [K/128]`` every block of 128 keeps its 128 bytes, ``[M, K]``: its codes, or 64
    bytes of nibbles and 64 zeros.
    """
    # [M, K/32, nibble, byte]
    halves = codes.view(torch.uint8).unflatten(1, (-1, 2, SPAN // 2)) & 15
    packed = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    if eight_bit is None:
        return packed
    blocks = codes.view(torch.uint8).unflatten(1, (-1, BLOCK))
    narrow = torch.nn.functional.pad(packed.unflatten(1, (-1, BLOCK // 2)), (0, BLOCK // 2))
    return torch.where(eight_bit.bool()[:, None], blocks, narrow).flatten(1)


def unpack_tokens(x: Tensor, eight_bit: Tensor | None) -> Tensor:
    """Inverse of :func:`pack_tokens`."""
    packed = x if eight_bit is None else x.unflatten(1, (-1, BLOCK))[:, :, : BLOCK // 2].flatten(1)
    vectors = packed.unflatten(1, (-1, SPAN // 2)).view(torch.int8)
    codes = torch.cat([vectors << 4 >> 4, vectors >> 4], -1).flatten(1)
    if eight_bit is None:
        return codes
    blocks = x.view(torch.int8).unflatten(1, (-1, BLOCK))
    narrow = codes.unflatten(1, (-1, BLOCK))
    return torch.where(eight_bit.bool()[:, None], blocks, narrow).flatten(1)
