"""compute-aware: weights in the order in which a W4A8 mma.m16n8k32 kernel uses them.

QServe section 4.2.1 (figure 9c) and appendix C (figure 17); byte for byte the order of its public
kernels. A tile of 32 rows x 32 columns is 512 contiguous bytes. Lane ``4 l + c`` of a warp owns the
16 bytes at ``16 (4 l + c)``, one 128-bit load: rows l, l + 8, l + 16, l + 24, columns ``4 c .. 4 c
+ 3`` and ``16 + 4 c .. 16 + 4 c + 3``. Byte ``8 kh + 4 h + b`` holds column ``16 kh + 4 c + b`` of
row ``8 h + l`` in its low nibble and of row ``16 + 8 h + l`` in its high one, so ``w & 0x0F0F0F0F``
and ``(w >> 4) & 0x0F0F0F0F`` are two finished registers.

``qweight`` is declared int8 ``[N, K / 2]``, but its row n is not weight row n. Level-2 scales and
zeros are ``[G, N]``, with the four rows l, l + 8, l + 16, l + 24 of a lane adjacent (0, 8, 16, 24,
1, 9, ...), so that a lane loads its four values by 32 bits; per-channel parameters keep their
order.

Packing needs only whole tiles. The public kernels also need N to be a multiple of 64 (per group) or
128 (per channel) and K of 128.

Examples:
    >>> n, k = torch.tensor([0, 16, 8, 0, 0]), torch.tensor([0, 0, 0, 16, 4])
    >>> byte, nibble = COMPUTE_AWARE.address(n, k, (32, 32))
    >>> byte.tolist(), nibble.tolist()
    ([0, 0, 4, 8, 16], [0, 1, 0, 0, 0])
    >>> COMPUTE_AWARE.pack_group(torch.arange(32)[:, None])[0, :8].tolist()
    [0, 8, 16, 24, 1, 9, 17, 25]
"""

import torch

from qtool.layouts.digit_layout import DigitLayout

COMPUTE_AWARE = DigitLayout(
    name="compute-aware",
    n="nt hi:2 h:2 l:8",
    k="kt kh:2 c:4 b:4",
    order="nt, kt, l c kh h b",
    nibble="hi",
    dtype=torch.int8,
    rows=True,
    group_order="g, nt l hi h",
)
