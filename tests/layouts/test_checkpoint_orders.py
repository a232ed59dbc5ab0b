"""compute-aware, marlin, qqq and w4ax-interleaved, element by element against closed forms: those
read from their loaders' sources, and that of COMET's figures.
"""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from qtool.layouts.compute_aware import COMPUTE_AWARE
from qtool.layouts.digit_layout import DigitLayout
from qtool.layouts.marlin import MARLIN
from qtool.layouts.qqq import QQQ_CHANNEL, QQQ_GROUP
from qtool.layouts.w4ax_interleaved import W4AX_INTERLEAVED

INTERLEAVE = [0, 4, 1, 5, 2, 6, 3, 7]


def random_codes(n: int, k: int) -> Tensor:
    return torch.randint(
        0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n * k)
    )


def marlin_nibble(kr: int, b: int) -> int:
    return INTERLEAVE[4 * b + kr % 2 + 2 * (kr // 8)]


def qqq_group_nibble(kr: int, b: int) -> int:
    return INTERLEAVE[4 * b + kr % 4]


def qqq_channel_nibble(kr: int, b: int) -> int:
    return [1, 3, 5, 7, 0, 2, 4, 6][4 * b + kr % 4]


@pytest.mark.parametrize(
    ("layout", "quad", "nibble"),
    [
        (MARLIN, lambda kr: kr % 8 // 2, marlin_nibble),
        (QQQ_GROUP, lambda kr: kr // 4, qqq_group_nibble),
        (QQQ_CHANNEL, lambda kr: kr // 4, qqq_channel_nibble),
    ],
    ids=["marlin", "qqq-g128", "qqq"],
)
def test_marlin_words(
    layout: DigitLayout, quad: Callable[[int], int], nibble: Callable[[int, int], int]
) -> None:
    codes = random_codes(128, 256)
    words = layout.pack(codes)["qweight"]
    assert (words.dtype, words.shape) == (torch.int32, (256 // 16, 2 * 128))
    expected = torch.zeros_like(words, dtype=torch.long)
    for n, k in product(range(128), range(256)):
        kr, nc, t = k % 16, n % 16, n // 16
        column = 128 * (t // 4) + 4 * (4 * (nc % 8) + quad(kr)) + t % 4
        expected[k // 16, column] |= int(codes[n, k]) << 4 * nibble(kr, nc // 8)
    assert torch.equal(words.long() & 0xFFFFFFFF, expected)


@pytest.mark.parametrize("layout", [MARLIN, QQQ_GROUP, QQQ_CHANNEL], ids=lambda layout: layout.name)
def test_marlin_scales(layout: DigitLayout) -> None:
    group = [i + 8 * j for i in range(8) for j in range(8)]
    channel = [2 * i + j for i in range(4) for j in [0, 1, 8, 9, 16, 17, 24, 25]]
    scales = torch.arange(128 * 3).reshape(128, 3)
    if layout is not QQQ_CHANNEL:  # it has no group scales
        expected = scales.t().reshape(3, 2, 64)[:, :, group].reshape(3, 128)
        assert torch.equal(layout.pack_group(scales), expected)
    assert torch.equal(
        layout.pack_channel(scales[:, 0]), scales[:, 0].reshape(4, 32)[:, channel].flatten()
    )


def test_one_group_is_a_channel_to_marlin() -> None:
    scales = torch.arange(128.0)[:, None]
    assert torch.equal(MARLIN.pack_group(scales), MARLIN.pack_channel(scales[:, 0])[None])


def test_w4ax_words() -> None:
    """Row n keeps its K / 2 bytes; in a row the columns of COMET's figures 6 and 7."""
    n, k = 16, 64
    codes = random_codes(n, k)
    expected = torch.zeros(n, k // 2, dtype=torch.long)
    for row, column in product(range(n), range(k)):
        q, j, c, s, p = (column // size % 2 for size in (16, 8, 4, 2, 1))
        word = 2 * (2 * (column // 32) + q) + c
        expected[row, 4 * word + 2 * j + p] |= int(codes[row, column]) << 4 * s
    stored = W4AX_INTERLEAVED.pack(codes)["qweight"]
    assert torch.equal(stored.view(torch.uint8).flatten().long(), expected.flatten())
    scales = torch.arange(n * 3).reshape(n, 3)
    assert torch.equal(W4AX_INTERLEAVED.pack_group(scales).flatten(), scales.t().flatten())


def test_qserve_bytes() -> None:
    n, k = 96, 128
    codes = random_codes(n, k)
    stored = COMPUTE_AWARE.pack(codes)["qweight"]
    assert (stored.dtype, stored.shape) == (torch.int8, (n, k // 2))
    expected = torch.zeros(n * k // 2, dtype=torch.long)
    for row, column in product(range(n), range(k)):
        nl, kl = row % 32, column % 32
        hi, h, lane = nl // 16, nl // 8 % 2, nl % 8
        kh, k4, k0 = kl // 16, kl // 4 % 4, kl % 4
        byte = (
            (row // 32 * (k // 32) + column // 32) * 512
            + (4 * lane + k4) * 16
            + 8 * kh
            + 4 * h
            + k0
        )
        expected[byte] |= int(codes[row, column]) << 4 * hi
    assert torch.equal(stored.view(torch.uint8).flatten().long(), expected)


def test_qserve_scales_and_zeros() -> None:
    order = [8 * row + lane for lane in range(8) for row in range(4)]  # 0, 8, 16, 24, 1, 9, ...
    s2 = torch.arange(192).to(torch.int8).reshape(64, 3)
    expected = s2.t().reshape(3, 2, 32)[:, :, order].reshape(3, 64)
    assert torch.equal(COMPUTE_AWARE.pack_group(s2), expected)
    s1 = torch.arange(64.0)
    assert torch.equal(COMPUTE_AWARE.pack_channel(s1), s1)
