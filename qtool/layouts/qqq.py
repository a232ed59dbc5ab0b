"""qqq: MARLIN's order turned to int8 mma.m16n8k16, for W4A8 checkpoints of the QQQ project.

It is from no paper of this toolkit: the order is that of QQQ's public checkpoint (``B`` int32 ``[K
/ 16, 2 N]``), and an export writes it. It is the order of :mod:`qtool.layouts.marlin`, but lane ``4
c + q`` takes four consecutive inputs ``4 q .. 4 q + 3`` of outputs c and c + 8 (digit b): e = 4 b +
k % 4. Two variants place e in the word:

- ``qqq-g128`` (per group, codes 0..15, ``w8 = rne((c - 8) * s_group)``): nibble
  ``[0, 4, 1, 5, 2, 6, 3, 7][e]``, MARLIN's, since the codes become fp16 first;
- ``qqq`` (per channel, two's complement codes): nibble ``[1, 3, 5, 7, 0, 2, 4, 6][e]``, so that
  ``w & 0xF0F0F0F0`` is the register of output c, ``(w << 4) & 0xF0F0F0F0`` that of output c + 8, as
  bytes worth 16 times the code.

QQQ's file permutes scales as MARLIN's does: ``s_group`` by blocks of 64, ``s_channel`` by blocks of
32. In a native checkpoint both variants hold a scheme's own codes, 0..15 for ``w4a16``, and its
scales ``[N, G]``, as they are in ``qqq`` and by blocks of 64 in ``qqq-g128``, one group too.

Examples:
    >>> codes = torch.zeros(64, 128, dtype=torch.uint8)
    >>> codes[0, :4], codes[8, :4] = torch.arange(4), torch.arange(4, 8)  # e = 0..7
    >>> hex(QQQ_GROUP.pack(codes)["qweight"][0, 0]), hex(QQQ_CHANNEL.pack(codes)["qweight"][0, 0])
    ('0x75316420', '0x37261504')
"""

import torch

from qtool.layouts.digit_layout import DigitLayout
from qtool.layouts.marlin import CHANNEL_ORDER, GROUP_ORDER, N_DIGITS

QQQ_GROUP = DigitLayout(
    name="qqq-g128",
    n=N_DIGITS,
    k="kb kt:8 q:4 k1:2 k0:2",
    order="kb kt, nt cq cl q j1 j0 k0 b",
    nibble="k1",
    dtype=torch.int32,
    group_order=GROUP_ORDER,
    channel_order=CHANNEL_ORDER,
)
QQQ_CHANNEL = DigitLayout(
    name="qqq",
    n=N_DIGITS,
    k="kb kt:8 q:4 e:4",
    order="kb kt, nt cq cl q j1 j0 e",
    nibble="b",
    low=1,
    dtype=torch.int32,
    channel_order=CHANNEL_ORDER,
)
