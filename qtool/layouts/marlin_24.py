"""marlin-24: a 2:4 sparse weight as its kept values and their positions.

Sparse-MARLIN (MARLIN section 4, figures 7 and 8) and its public checkpoint. Of every four
consecutive inputs two are kept. The values are a matrix ``[N, K / 2]`` in an order like MARLIN's,
but for ``mma.sp``, whose sparse operand is on the left: ``qweight`` int32 ``[K / 32, 2 N]``
(``B_24``). The positions are one nibble a quad, ``first + 4 * second``, a matrix ``[N, K / 4]``,
four nibbles an int16, ordered so that one ldmatrix serves four ``mma.sp``: ``metadata`` int16 ``[K
/ 32, 2 N]`` (``B_meta``). Each of the two matrices is a digit permutation.

A dropped input is a zero of the weight: code 8 if codes are unsigned (``w = (c - 8) * s``, as in
the checkpoint), 0 if they are two's complement. A quad with fewer than two non-zeros keeps the
positions that CUTLASS would: none (2, 3), only 0 (0, 2), only 1 (1, 2), only 2 or 3 (2, 3).

Group scales are ``[G, N]``, in every eight 0, 4, 1, 5, 2, 6, 3, 7; per-channel scales (or one
group) keep their order.

Examples:
    >>> codes = torch.full((128, 128), 8, dtype=torch.uint8)
    >>> codes[0, :8] = torch.tensor([8, 1, 8, 2, 3, 8, 4, 8])  # keeps (1, 3) and (0, 2)
    >>> packed = MARLIN_24.pack(codes)
    >>> hex(packed["qweight"][0, 0] & 0xFF), hex(packed["qweight"][0, 16] & 0xFF)  # kept 0 and 2
    ('0x81', '0x88')
    >>> hex(packed["metadata"][0, 0] & 0xFF)  # 0b1101 for (1, 3), 0b1000 for (0, 2)
    '0x8d'
"""

from typing import ClassVar

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.layouts.base import Layout, require_codes
from qtool.layouts.digit_layout import DigitLayout
from qtool.layouts.words import as_words, sign_extend_

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
#: first kept position + 4 * second, by bits that tell which of a quad's inputs are not zero; 0 if
#: they are too many
POSITIONS = (
    *(0b1110, 0b1000, 0b1001, 0b0100),
    *(0b1110, 0b1000, 0b1001, 0),
    *(0b1110, 0b1100, 0b1101, 0),
    *(0b1110, 0, 0, 0),
)


class Marlin24Layout(Layout):
    """Kept values and their positions, each in its own digit layout."""

    name = "marlin-24"
    bits = 4
    tensors: ClassVar[tuple[str, ...]] = ("qweight", "metadata")
    sparsity = (2, 4)
    tile = (128, 128)

    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        require_codes(self.name, codes)
        self.require(*codes.shape)
        zero = 0 if codes.dtype == torch.int8 else 8
        blocks = (compress(block, zero) for block in codes.split(_block(codes)))
        values, positions = map(torch.cat, zip(*blocks, strict=True))
        return {
            "qweight": VALUES.pack(values)["qweight"],
            "metadata": METADATA.pack(positions)["qweight"],
        }

    def unpack(self, packed: dict[str, Tensor], n: int, k: int, *, signed: bool) -> Tensor:
        self.require(n, k)
        values = VALUES.unpack({"qweight": packed["qweight"]}, n, k // 2, signed=False)
        positions = METADATA.unpack({"qweight": packed["metadata"]}, n, k // 4, signed=False)
        codes = values.new_empty((n, k))
        rows = _block(codes)
        for block in zip(values.split(rows), positions.split(rows), codes.split(rows), strict=True):
            expand(*block, zero=0 if signed else 8)
        return sign_extend_(codes) if signed else codes

    def pack_group(self, param: Tensor) -> Tensor:
        return param.t().contiguous() if param.shape[1] == 1 else VALUES.pack_group(param)

    def unpack_group(self, stored: Tensor, n: int) -> Tensor:
        return stored.reshape(n, 1) if stored.numel() == n else VALUES.unpack_group(stored, n)


def compress(codes: Tensor, zero: int) -> tuple[Tensor, Tensor]:
    """The two kept nibbles ``[N, K / 2]`` and their positions ``[N, K / 4]`` of each quad, uint8.

    Raises:
        QtoolError: if a quad has more than two non-zeros.
    """
    # [N, K/4], a zero is now 0
    quads = (as_words(codes, torch.int32) & 0x0F0F0F0F) ^ zero * 0x01010101
    nonzero = ((quads + 0x0F0F0F0F) >> 4) & 0x01010101
    which = ((nonzero * 0x01020408) >> 24) & 0xF  # gathers the four bytes into four bits
    table = torch.tensor(POSITIONS, dtype=torch.uint8, device=codes.device)
    positions = table.index_select(0, which.flatten()).view_as(which)
    if not codes.is_meta and not bool(positions.all()):
        bad = int((positions == 0).sum())
        found = f"{bad} of {positions.numel()} quads of inputs hold more than two non-zeros"
        raise QtoolError(f"layout marlin-24: {found}; a 2:4 sparse weight is needed")
    first, second = _shifts(positions)
    second = (quads >> second).bitwise_and_(0xF).bitwise_left_shift_(8)
    pairs = quads.bitwise_right_shift_(first).bitwise_and_(0xF).bitwise_or_(second)
    return pairs.bitwise_xor_(zero * 0x0101).to(torch.int16).view(torch.uint8), positions


def expand(values: Tensor, positions: Tensor, codes: Tensor, *, zero: int) -> None:
    """Inverse of :func:`compress`, into ``codes [N, K]``: ``zero`` where nothing was kept.

    Raises:
        QtoolError: if a quad's positions are not two, in order.
    """
    first, second = _shifts(positions)
    if not positions.is_meta and bool((first >= second).any()):
        raise QtoolError(
            "layout marlin-24: the metadata names a position twice or out of order; the file is "
            "damaged"
        )
    # [N, K/4], a zero is now 0
    pairs = values.view(torch.int16).to(torch.int32).bitwise_xor_(zero * 0x0101)
    quads = (pairs & 0xFF).bitwise_left_shift_(first)
    quads.bitwise_or_(pairs.bitwise_right_shift_(8).bitwise_left_shift_(second))
    torch.bitwise_xor(quads, zero * 0x01010101, out=codes.view(torch.int32))


def _shifts(positions: Tensor) -> tuple[Tensor, Tensor]:
    """The bits by which the first and second kept byte of a quad lie above its lowest."""
    wide = positions.to(torch.int32)
    return (wide & 3).bitwise_left_shift_(3), (wide >> 2).bitwise_left_shift_(3)


def _block(codes: Tensor) -> int:
    """Rows taken at a time, so that intermediates stay in a CPU's cache or small on a GPU."""
    return max(1, 2 ** (20 if codes.device.type == "cpu" else 24) // codes.shape[1])


MARLIN_24 = Marlin24Layout()
