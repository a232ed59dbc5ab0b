"""apex4: s4 fragments that ldmatrix delivers ready for mma.m16n8k32 / m16n8k64.

APEX4 section 4.4 ("Weight Matrix Processing", figures 7b and 8): the weight, seen as K x N, is
*vertically compressed*. 32 consecutive inputs of one output channel become one 16-byte vector, and
the vectors lie as a matrix ``[K / 32, N]``: a block tile of 128 x 256 (K x N) is 4 x 256 vectors,
and the instruction tile of 32 x 8 is 1 x 8 vectors, side by side in one row and hence free of bank
conflicts. One ldmatrix of those 8 vectors gives lane ``4 c + q`` the 32-bit word q of output
channel c: inputs ``8 q .. 8 q + 7``, lowest nibble first, which is the s4 fragment of m16n8k32. The
second register of m16n8k64 is the same word of the next row of vectors (inputs 32 .. 63).

The codes are two's complement nibbles; the instruction reads their sign itself. Group scales are
``[G, N]``: lanes of a quad take the adjacent pairs 0-1, 2-3, 4-5, 6-7 of the accumulator's columns.

The paper leaves two points open. Here the matrix of vectors is that of the whole weight (a tile's
rows are 16 N bytes apart in global memory), and a vector holds its 32 inputs in order, since the
fragment needs eight consecutive inputs per lane.

Examples:
    >>> import torch
    >>> byte, nibble = APEX4.address(torch.tensor(3), torch.tensor(32 + 13), (8, 64))
    >>> int(byte), int(nibble)  # vector (1, 3) of 8 columns; input 13 is nibble 5 of word 1
    (182, 1)
    >>> 16 * (1 * 8 + 3) + 4 * 1 + 5 // 2
    182
"""

from qtool.layouts.digit_layout import DigitLayout

APEX4 = DigitLayout(
    name="apex4",
    n="nt c:8",
    k="kt q:4 b:4 half:2",
    order="kt, nt c, q b",
    nibble="half",
    group_order="g, nt c",
)
