"""marlin-24: a 2:4 sparse weight as its kept values and the positions they were kept at.

Sparse-MARLIN (MARLIN section 4, figures 7 and 8) and its public checkpoint. Of every four consecutive
inputs two are kept. The values are a matrix ``[N, K / 2]`` in MARLIN's manner, but for ``mma.sp``, whose sparse
operand is on the left: ``qweight`` int32 ``[K / 32, 2 N]`` (``B_24``). The positions are one nibble a quad,
``first + 4 * second``, a matrix ``[N, K / 4]``, four nibbles an int16, ordered so that one ldmatrix serves four
``mma.sp``: ``metadata`` int16 ``[K / 32, 2 N]`` (``B_meta``). Each of the two matrices is a digit permutation.

A dropped input is a zero of the weight: code 8 where codes are unsigned (``w = (c - 8) * s``, what the checkpoint
holds), 0 where they are two's complement. A quad with fewer than two non-zeros keeps the positions that CUTLASS
would: none (2, 3), only 0 (0, 2), only 1 (1, 2), only 2 or 3 (2, 3).

Group scales are ``[G, N]``, in every eight 0, 4, 1, 5, 2, 6, 3, 7; per-channel scales (or one group) keep their order.

>>> codes = torch.full((128, 128), 8, dtype=torch.uint8)
>>> codes[0, :8] = torch.tensor([8, 1, 8, 2, 3, 8, 4, 8])  # keeps (1, 3) and (0, 2)
>>> packed = MARLIN_24.pack(codes)
>>> hex(packed["qweight"][0, 0] & 0xFF), hex(packed["qweight"][0, 16] & 0xFF)  # kept 0 and 2, whose rows differ
('0x81', '0x88')
>>> hex(packed["metadata"][0, 0] & 0xFF)  # 0b1101 for (1, 3), 0b1000 for (0, 2)
'0x8d'
"""

from typing import ClassVar

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.layouts.base import Layout, require_codes, require_tile
from qtool.layouts.digit_layout import DigitLayout

VALUES = DigitLayout(
    name="marlin-24 values",
    n="nt co:4 c1:2 blk:2 j:4",
    k="kt kh:2 q:4 k0:2",
    order="kt, nt co c1 q j k0 blk",
    nibble="kh",
    dtype=torch.int32,
    group_order="g, nt co c1 j blk",
)
METADATA = DigitLayout(
    name="marlin-24 metadata",
    n="nt r3:8 r2:2 r1:2 r0:2",
    k="mt m0:2 pair:2 half:2",
    order="mt, nt r1 r3 r0 m0 r2 pair",
    nibble="half",
    dtype=torch.int16,
)


class Marlin24Layout(Layout):
    """Kept values and their positions, each in its own digit layout."""

    name = "marlin-24"
    bits = 4
    tensors: ClassVar[tuple[str, ...]] = ("qweight", "metadata")
    tile = (128, 128)

    def require(self, n: int, k: int) -> None:
        require_tile(self.name, n, k, self.tile)

    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        require_codes(self.name, codes)
        self.require(*codes.shape)
        blocks = zip(*map(compress, codes.split(_block(codes.shape[1]))), strict=True)
        values, positions = (torch.cat(parts) for parts in blocks)
        return {"qweight": VALUES.pack(values)["qweight"], "metadata": METADATA.pack(positions)["qweight"]}

    def unpack(self, packed: dict[str, Tensor], n: int, k: int, *, signed: bool) -> Tensor:
        self.require(n, k)
        values = VALUES.unpack({"qweight": packed["qweight"]}, n, k // 2, signed=signed)
        positions = METADATA.unpack({"qweight": packed["metadata"]}, n, k // 4, signed=False)
        codes, rows = values.new_empty((n, k)), _block(k)
        for block in zip(values.split(rows), positions.split(rows), codes.split(rows), strict=True):
            expand(*block)
        return codes

    def pack_group(self, param: Tensor) -> Tensor:
        return param.t().contiguous() if param.shape[1] == 1 else VALUES.pack_group(param)

    def unpack_group(self, stored: Tensor, n: int) -> Tensor:
        return stored.reshape(n, 1) if stored.numel() == n else VALUES.unpack_group(stored, n)


def compress(codes: Tensor) -> tuple[Tensor, Tensor]:
    """The two kept codes ``[N, K / 2]`` and their positions ``first + 4 * second`` (uint8 ``[N, K / 4]``) of each quad.

    Raises:
        QtoolError: if a quad has more than two non-zeros.
    """
    c0, c1, c2, c3 = (c.contiguous() for c in codes.unflatten(1, (-1, 4)).unbind(-1))  # each [N, K/4]
    kept0, kept1, kept2, kept3 = (c != _zero(codes.dtype) for c in (c0, c1, c2, c3))
    both, neither = kept0 & kept1, ~(kept0 | kept1)
    crowded = (both & (kept2 | kept3)) | (kept2 & kept3 & ~neither)
    if not codes.is_meta and bool(crowded.any()):
        found = f"{int(crowded.sum())} of {crowded.numel()} quads of inputs hold more than two non-zeros"
        raise QtoolError(f"layout marlin-24: {found}; a 2:4 sparse weight is needed")
    last = kept3 | neither  # the second kept is 3; else 1 if both of the first two are kept, else 2
    first = (~kept0).view(torch.uint8) + neither.view(torch.uint8)
    second = last.view(torch.uint8) - both.view(torch.uint8) + 2
    values = torch.stack(
        (torch.where(kept0, c0, torch.where(kept1, c1, c2)), torch.where(both, c1, torch.where(last, c3, c2))), -1
    )
    return values.flatten(1), first.bitwise_or_(second << 2)


def expand(values: Tensor, positions: Tensor, codes: Tensor) -> None:
    """Inverse of :func:`compress`, into ``codes [N, K]``: zero where nothing was kept.

    Raises:
        QtoolError: if a quad's positions are not two, in order.
    """
    first, second = positions & 3, positions >> 2
    if not positions.is_meta and bool((first >= second).any()):
        raise QtoolError("layout marlin-24: the metadata names a position twice or out of order; the file is damaged")
    v0, v1 = (v.contiguous() for v in values.unflatten(1, (-1, 2)).unbind(-1))  # each [N, K/4]
    zero = torch.full((), _zero(values.dtype), dtype=values.dtype, device=values.device)
    for position, out in enumerate(codes.unflatten(1, (-1, 4)).unbind(-1)):
        out.copy_(torch.where(first == position, v0, torch.where(second == position, v1, zero)))


def _block(k: int) -> int:
    """Rows taken at a time, so that the intermediates of :func:`compress` stay small beside the weight."""
    return max(1, 2**23 // k)


def _zero(dtype: torch.dtype) -> int:
    """The code of a zero weight."""
    return 0 if dtype == torch.int8 else 8


MARLIN_24 = Marlin24Layout()
