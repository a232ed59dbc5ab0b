"""marlin: a thread's 16-byte load is its share of four 16 x 16 fp16 mma blocks.

MARLIN section 3.4 ("Dequantization and Tensor Cores") and its public checkpoint: ``B`` int32 ``[K /
16, 2 N]``. A tile of 16 inputs x 64 outputs is 128 words; lane ``4 c + q`` owns words ``4 (4 c + q)
+ j``, block j = 0..3 of 16 outputs. Word j holds outputs ``16 j + c`` and ``+ 8`` (digit b), inputs
``2 q``, ``2 q + 1`` (digit k0) and the same ``+ 8`` (digit kh). Counting these eight codes in
fragment order ``e = 4 b + 2 kh + k0``, the low half word holds, from its high nibble down, 6 4 2 0
and the high half word 7 5 3 1 - the paper's 64207531 - so that two lop3 of ``w`` and two of ``w >>
8`` yield the four half2 registers.

Group scales are ``[G, N]``, permuted in blocks of 64 (0, 8, 16, ..., 56, 1, 9, ...) to the same
lanes; per-channel scales - also a group parameter with one group - in blocks of 32 (0, 1, 8, 9, 16,
17, 24, 25, 2, 3, ...), the order of the accumulator.

Codes are unsigned, ``w = (c - 8) * s``. The tile is 64 x 128 (N x K), which every known reader
requires.

Examples:
    >>> words = MARLIN.pack(torch.zeros(64, 128, dtype=torch.uint8))["qweight"]
    >>> words.shape, words.dtype
    (torch.Size([8, 128]), torch.int32)
    >>> codes = torch.zeros(64, 128, dtype=torch.uint8)
    >>> places = [(0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8)]
    >>> for e, (k, n) in enumerate(places):
    ...     codes[n, k] = e
    >>> hex(MARLIN.pack(codes)["qweight"][0, 0])
    '0x75316420'
    >>> MARLIN.pack_channel(torch.arange(64))[:10].tolist()
    [0, 1, 8, 9, 16, 17, 24, 25, 2, 3]
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.layouts.digit_layout import DigitLayout

#: the outputs of a tile, shared with QQQ: n = 64 nt + 32 j1 + 16 j0 + 8 b + 2 cq + cl, lane digit c
#: = (cq, cl)
N_DIGITS = "nt j1:2 j0:2 b:2 cq:4 cl:2"
GROUP_ORDER = "g, nt cq cl j1 j0 b"
CHANNEL_ORDER = "nt j1 cq j0 b cl"


@dataclass(frozen=True)
class MarlinLayout(DigitLayout):
    """Digits, plus MARLIN's rule that a parameter with one group is a per-channel one."""

    def pack_group(self, param: Tensor) -> Tensor:
        if param.shape[1] == 1:
            return self.pack_channel(param[:, 0])[None]
        return super().pack_group(param)

    def unpack_group(self, stored: Tensor, n: int) -> Tensor:
        if stored.numel() == n:
            return self.unpack_channel(stored.flatten())[:, None]
        return super().unpack_group(stored, n)


MARLIN = MarlinLayout(
    name="marlin",
    n=N_DIGITS,
    k="kb kt:8 kh:2 q:4 k0:2",
    order="kb kt, nt cq cl q j1 j0 k0 b",
    nibble="kh",
    dtype=torch.int32,
    group_order=GROUP_ORDER,
    channel_order=CHANNEL_ORDER,
)
