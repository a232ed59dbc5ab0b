"""w4ax-interleaved: s4 weights, each loaded once by the thread that multiplies it as s8.

COMET section 4.3. Figure 6: an int8 mma thread T0 needs inputs 0-3 and 8-11 of a row, T1 needs 4-7
and 12-15; here those eight nibbles are one 32-bit word, so each thread loads one word, and no two
threads load the same word. Figure 7, the location switch: in every 16-bit unit of four codes
W0..W3, W1 and W2 change places, so the nibbles from bit 0 up are W0, W2, W1, W3; then ``(w << 4) &
0xF0F0F0F0`` is W0 and W1, and ``w & 0xF0F0F0F0`` is W2 and W3, as bytes worth 16 times the code
(the scale is divided by 16).

Row n keeps its K / 2 bytes. In a row, column ``16 q + 8 j + 4 c + 2 s + p`` lies in word ``2 q +
c``, byte ``2 j + p``, nibble s.

The paper leaves these points open; here they are fixed as follows:

- Figure 6 draws a simplified mma.m8n4k16 (two threads a row); its 0-3 / 8-11 is kept as drawn,
  within every 16 inputs. An mma.m16n8k32 (four threads a row) takes two such units; then lane ``2 q
  + c``, register j, byte ``2 s + p`` is input ``16 q + 8 j + 4 c + 2 s + p``, and the activation is
  stored in the same order.
- The same order serves the 4-bit blocks: a sum over k does not see a permutation that both
  operands share, so an s4 activation packed by this layout multiplies the weight as stored.
- The switch is per 16-bit unit, as figure 7 draws it; putting the pairs together into a register of
  four consecutive inputs is one byte permute each.
- The tile of 8 rows x 32 columns is the weight fragment of one mma.m16n8k32.
- Scales are ``[G, N]``: those of one block of input channels lie together, as a main loop over K
  reads them.

Examples:
    >>> import torch
    >>> codes = torch.arange(16, dtype=torch.uint8).repeat(8, 2)
    >>> words = W4AX_INTERLEAVED.pack(codes)["qweight"].view(torch.int32)[0, :2]
    >>> [f"{word & 0xFFFFFFFF:08x}" for word in words.tolist()]
    ['b9a83120', 'fdec7564']
"""

from qtool.layouts.digit_layout import DigitLayout

W4AX_INTERLEAVED = DigitLayout(
    name="w4ax-interleaved",
    n="nt row:8",
    k="kt q:2 j:2 c:2 s:2 p:2",
    order="nt row, kt q c j p",
    nibble="s",
    group_order="g, nt row",
)
