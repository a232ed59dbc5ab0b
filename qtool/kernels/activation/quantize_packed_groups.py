"""``qtool::quantize_packed_groups``: s4 codes of a linear's input as nibbles, for s4 tensor cores;
s8 ones by block.

The numbers of :mod:`qtool.kernels.activation.quantize_activation_groups`, in one pass: of each 32
inputs, in the order of the weight's layout, the first 16 codes are the low nibbles of 16 bytes, the
others the high ones. So a token's bytes lie as a weight's do in that layout, and the words of both
meet in an s4 instruction.
"""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.activation.arrangement import SPAN
from qtool.kernels.activation.quantize_activation_groups import (
    definition,
    launch_groups,
    quantize_activation_groups,
    require,
    shapes,
)
from qtool.kernels.build import Build
from qtool.schemes.fmpq import BLOCK


def builds() -> Iterator[Build]:
    """Both layouts, with and without 8-bit blocks."""
    for arch, (layout, packed) in product(
        ("sm_80", "sm_89", "sm_90a"), (("apex4", 1), ("w4ax-interleaved", 2))
    ):
        source = definition(4096, torch.float16, "none", True, BLOCK, layout, packed)
        yield Build(
            f"quantize_packed_groups {layout}", arch, source, source[2]["THREADS"], calls=True
        )


@torch.library.custom_op("qtool::quantize_packed_groups", mutates_args=())
def quantize_packed_groups(
    x: Tensor,
    order: Tensor | None,
    norm: Tensor | None,
    eight_bit: Tensor | None,
    fusion: str,
    epsilon: float,
    group_size: int | None,
    layout: str,
) -> tuple[Tensor, Tensor]:
    """Codes uint8 ``[M, K/2]`` (:func:`pack_tokens`; with ``eight_bit`` ``[M, K]``) and scales
    float32 ``[G, M4]``.

    Args:
        x, order, norm, eight_bit, fusion, epsilon, group_size: as of
            :func:`quantize_activation_groups`; a group is a block of 128 where ``eight_bit`` is
            given.
        layout: of the weight, ``apex4`` or ``w4ax-interleaved``.

    Raises:
        QtoolError: for a wrong dtype, shape, stride or device; one sentence.
    """
    _require(x, order, norm, eight_bit, fusion, group_size, layout)
    codes, scale = quantize_activation_groups(
        x, order, norm, eight_bit, fusion, epsilon, group_size, layout
    )
    return pack_tokens(codes, eight_bit), scale


@quantize_packed_groups.register_kernel("cuda")
def _(
    x: Tensor,
    order: Tensor | None,
    norm: Tensor | None,
    eight_bit: Tensor | None,
    fusion: str,
    epsilon: float,
    group_size: int | None,
    layout: str,
) -> tuple[Tensor, Tensor]:
    k = _require(x, order, norm, eight_bit, fusion, group_size, layout)
    codes, scale = _outputs(x, k, eight_bit, group_size)
    packed = 1 if eight_bit is None else 2
    launch_groups(
        x, order, norm, eight_bit, fusion, epsilon, group_size, layout, codes, scale, k, packed
    )
    return codes, scale


@quantize_packed_groups.register_fake
def _(
    x: Tensor,
    order: Tensor | None,
    norm: Tensor | None,
    eight_bit: Tensor | None,
    fusion: str,
    epsilon: float,
    group_size: int | None,
    layout: str,
) -> tuple[Tensor, Tensor]:
    k = _require(x, order, norm, eight_bit, fusion, group_size, layout)
    return _outputs(x, k, eight_bit, group_size)


def pack_tokens(codes: Tensor, eight_bit: Tensor | None) -> Tensor:
    """Codes int8 ``[M, K]`` in a layout's arrangement as nibbles, uint8 ``[M, K/2]``.

    With ``eight_bit [K/128]`` every block of 128 keeps its 128 bytes, ``[M, K]``: its codes, or 64
    bytes of nibbles and 64 zeros.
    """
    halves = (
        codes.view(torch.uint8).unflatten(1, (-1, 2, SPAN // 2)) & 15
    )  # [M, K/32, nibble, byte]
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
    return torch.where(eight_bit.bool()[:, None], blocks, codes.unflatten(1, (-1, BLOCK))).flatten(
        1
    )


def _outputs(
    x: Tensor, k: int, eight_bit: Tensor | None, group_size: int | None
) -> tuple[Tensor, Tensor]:
    codes = x.new_empty((len(x), k // 2 if eight_bit is None else k), dtype=torch.uint8)
    return codes, x.new_empty(shapes(x, k, group_size)[1], dtype=torch.float32)


def _require(
    x: Tensor,
    order: Tensor | None,
    norm: Tensor | None,
    eight_bit: Tensor | None,
    fusion: str,
    group_size: int | None,
    layout: str,
) -> int:
    """Refuse what the kernel cannot do; returns K."""
    if layout == "none" or (eight_bit is not None and group_size != BLOCK):
        raise QtoolError(
            f"quantize_packed_groups: layout {layout!r} and group size {group_size}; expected a weight's layout, and"
            f" {BLOCK} where some blocks have 8 bits"
        )
    return require(x, order, norm, eight_bit, fusion, group_size, layout)
