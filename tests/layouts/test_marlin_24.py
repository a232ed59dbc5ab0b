"""marlin-24 against the steps of its public packer: prune positions, value permutation, metadata
scatter.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.layouts.marlin_24 import MARLIN_24
from tests.exchange.readers import sparse_permutation

N, K = 128, 256
#: kept positions, non-zero inputs -> stored nibble
POSITIONS = {
    (): 0b1110, (0,): 0b1000, (1,): 0b1001, (2,): 0b1110, (3,): 0b1110,
    (0, 1): 0b0100, (0, 2): 0b1000, (1, 2): 0b1001, (0, 3): 0b1100, (1, 3): 0b1101, (2, 3): 0b1110,
}  # fmt: skip


def every_quad() -> Tensor:
    """Codes ``[N, K]`` whose quads run through every legal set of non-zeros, with random values."""
    generator = torch.Generator().manual_seed(24)
    quads = torch.full((N * K // 4, 4), 8, dtype=torch.uint8)
    values = torch.tensor([c for c in range(16) if c != 8], dtype=torch.uint8)
    for i, kept in enumerate(
        torch.randint(len(POSITIONS), (len(quads),), generator=generator).tolist()
    ):
        for position in list(POSITIONS)[kept]:
            quads[i, position] = values[torch.randint(15, (), generator=generator)]
    return quads.view(N, K)


def compressed(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Values ``[N, K / 2]`` and position nibbles ``[N, K / 4]``, quad by quad."""
    values = torch.zeros(N, K // 2, dtype=torch.long)
    nibbles = torch.zeros(N, K // 4, dtype=torch.long)
    for n, quad in product(range(N), range(K // 4)):
        four = codes[n, 4 * quad : 4 * quad + 4].tolist()
        nibble = POSITIONS[tuple(i for i in range(4) if four[i] != 8)]
        nibbles[n, quad] = nibble
        values[n, 2 * quad], values[n, 2 * quad + 1] = four[nibble & 3], four[nibble >> 2]
    return values, nibbles


def packed_values(values: Tensor) -> Tensor:
    """The packer's permutation of 1024 values, eight to a word."""
    tiles = (
        values.t()
        .reshape(K // 32, 16, N // 16, 16)
        .permute(0, 2, 1, 3)
        .reshape(-1, 1024)[:, sparse_permutation()]
    )
    return (tiles.reshape(K // 32, 2 * N, 8) << 4 * torch.arange(8)).sum(-1)


def packed_metadata(nibbles: Tensor) -> Tensor:
    """The packer's (CUTLASS's) scatter of int16 metadata ``[N, K / 16]``."""
    words = (nibbles.reshape(N, K // 16, 4) << 4 * torch.arange(4)).sum(-1)
    stored = torch.zeros(N * K // 16, dtype=torch.long)
    for r, m in product(range(N), range(K // 16)):
        row = r // 64 * 64 + r % 2 * 2 + r % 8 // 4 + r % 32 % 4 // 2 * 32 + r % 64 // 8 * 4
        column = m
        if row % 2 == 0 and m % 2 == 1:
            row, column = row + 1, m - 1
        elif row % 2 == 1 and m % 2 == 0:
            row, column = row - 1, m + 1
        stored[column // 2 * 2 * N + 2 * row + column % 2] = words[r, m]
    return stored.view(K // 32, 2 * N)


def test_values_and_metadata_are_the_public_packers() -> None:
    codes = every_quad()
    packed = MARLIN_24.pack(codes)
    values, nibbles = compressed(codes)
    assert (packed["qweight"].dtype, packed["metadata"].dtype) == (torch.int32, torch.int16)
    assert torch.equal(packed["qweight"].long() & 0xFFFFFFFF, packed_values(values))
    assert torch.equal(packed["metadata"].long() & 0xFFFF, packed_metadata(nibbles))
    assert torch.equal(MARLIN_24.unpack(packed, N, K, signed=False), codes)


def test_scales() -> None:
    scales = torch.arange(N * 2).reshape(N, 2)
    order = [8 * i + j for i in range(8) for j in (0, 4, 1, 5, 2, 6, 3, 7)]
    assert torch.equal(
        MARLIN_24.pack_group(scales), scales.t().reshape(2, 2, 64)[:, :, order].reshape(2, N)
    )
    assert torch.equal(MARLIN_24.pack_group(scales[:, :1]), scales[:, :1].t())
    assert torch.equal(MARLIN_24.pack_channel(scales[:, 0]), scales[:, 0])


def test_a_dense_weight_is_refused() -> None:
    codes = torch.full((N, K), 8, dtype=torch.uint8)
    for three in ([0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3], [0, 1, 2, 3]):
        dense = codes.clone()
        dense[5, [20 + i for i in three]] = 9
        with pytest.raises(QtoolError, match=f"1 of {N * K // 4} quads"):
            MARLIN_24.pack(dense)


def test_damaged_metadata_is_refused() -> None:
    packed = MARLIN_24.pack(every_quad())
    packed["metadata"][3, 7] = 0
    with pytest.raises(QtoolError, match="metadata names a position twice"):
        MARLIN_24.unpack(packed, N, K, signed=False)
