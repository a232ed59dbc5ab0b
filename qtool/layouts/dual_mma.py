"""dual-mma: one 16-byte load per thread feeds two Hopper wgmma m64nNk32 steps.

LiquidGEMM section 5.2. A tile of 64 rows x 64 columns is 2048 contiguous bytes; thread
``T = 32 w + 4 q + c`` of a warpgroup (warp w, lane 4 q + c) owns bytes 16 T .. 16 T + 15, four
32-bit words. Word ``r = 2 j + h`` holds in its low nibbles register r of the first k32 step, in its
high nibbles register r of the second: byte b is row ``16 w + 8 h + q``, column
``32 step + 16 j + 4 c + b``.

Level-2 parameters have the order of the threads: ``[N / 64, G, 64]``, with the rows q and q + 8 of
a thread adjacent.

Examples:
    >>> import torch
    >>> byte, nibble = DUAL_MMA.address(torch.tensor(9), torch.tensor(38), (64, 64))
    >>> int(byte), int(nibble)  # row 9: w=0 h=1 q=1; column 38: step 1, j=0, c=1, b=2
    (86, 1)
    >>> 16 * (4 * 1 + 1) + 4 * (2 * 0 + 1) + 2
    86
"""

from qtool.layouts.digit_layout import DigitLayout

DUAL_MMA = DigitLayout(
    name="dual-mma",
    n="nt w:4 h:2 q:8",
    k="kt step:2 j:2 c:4 b:4",
    order="nt, kt, w q c j h b",
    nibble="step",
    group_order="nt, g, w q h",
)
