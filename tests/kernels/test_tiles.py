"""The choice of tiles: always one that is compiled in CI, never more ring than shared memory."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from qtool.kernels.hopper import w4a8, w4a16, w8a8
from qtool.kernels.hopper.gemm import staging_bytes
from qtool.kernels.hopper.tiles import (
    RESIDENT,
    SHARED_PER_BLOCK,
    TABLE,
    TABLE_HALF,
    TABLE_S4,
    Tile,
    choose,
    choose_half,
    choose_s4,
)


@given(m=st.integers(1, 9000), n=st.integers(1, 1200), k=st.integers(1, 600))
def test_choice_is_in_the_table_and_fits(m: int, n: int, k: int) -> None:
    tile = choose(m, 64 * n, 64 * k)
    assert tile in TABLE
    assert tile.tokens >= min(m, 64)
    assert tile.split <= -(-k // 2)
    assert runs_at_once(tile, m, 64 * n)
    for operand in (w4a8.operand("w4a8-lqq", 32), w8a8.OPERAND):
        for dtype in (torch.bfloat16, torch.float32):
            stage = operand.stage(tile) + 128 * tile.tokens
            stages = tile.stages(operand.stage(tile), staging_bytes(tile, dtype))
            assert stages >= 3
            assert stages * stage <= SHARED_PER_BLOCK[tile.blocks_per_sm]


@given(
    m=st.integers(1, 9000),
    n=st.integers(1, 1200),
    k=st.integers(1, 600),
    group=st.sampled_from((32, 64, 128, 1024, None)),
)
def test_choice_for_s4_weights_is_in_its_table(m: int, n: int, k: int, group: int | None) -> None:
    tile = choose_s4(m, 64 * n, 64 * k, group)
    assert tile in TABLE_S4
    assert tile.tokens * tile.rows <= (256 if group is None else 128) * 128
    assert runs_at_once(tile, m, 64 * n)
    whole = choose_s4(m, 64 * n, 64 * k, group, split_k=False)
    assert whole in TABLE_S4 and (whole.split, whole.tokens) == (1, tile.tokens)


@given(
    m=st.integers(1, 9000),
    n=st.integers(1, 1200),
    k=st.integers(1, 300),
    group=st.sampled_from((0, 32, 64, 128)),
    x=st.sampled_from((torch.float16, torch.bfloat16)),
    scale=st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
    sparse=st.booleans(),
)
def test_choice_for_16_bit_tokens_is_in_its_table_and_fits(
    m: int, n: int, k: int, group: int, x: torch.dtype, scale: torch.dtype, sparse: bool
) -> None:
    scales_sums = group > 0 and scale != x
    tile = choose_half(m, 64 * n, 128 * k, scales_sums=scales_sums, sparse=sparse)
    assert replace(tile, blocks_per_sm=1) in {replace(t, blocks_per_sm=1) for t in TABLE_HALF}
    assert tile.panels == 1 and tile.tokens >= min(m, 64) and tile.split <= k
    assert not scales_sums or tile.tokens * tile.blocks_per_sm <= 128 // tile.blocks_per_sm
    operand = w4a16.operand(group, x, scale, tile.tokens, sparse=sparse)
    for dtype in (torch.bfloat16, torch.float32):
        stage = operand.stage(tile) + 128 * tile.tokens
        stages = tile.stages(operand.stage(tile), staging_bytes(tile, dtype))
        assert stages >= 2
        assert stages * stage <= SHARED_PER_BLOCK[tile.blocks_per_sm]


def runs_at_once(tile: Tile, m: int, n: int) -> bool:
    """Clusters of more than two have one tile each, so all of them must be resident."""
    tiles = -(-n // tile.rows) * -(-m // tile.tokens)
    return (
        tile.split <= 2 or tiles <= RESIDENT.get(tile.split, 132 // tile.split) * tile.blocks_per_sm
    )


def test_prefers_what_was_measured() -> None:
    """A few of the sweep's winners on an H200 (benchmarks/journal/kernels.md)."""
    winners = {
        (16, 4096, 14336): Tile(16, split=6, blocks_per_sm=2),
        (16, 8192, 8192): Tile(16, split=2, blocks_per_sm=2),
        (64, 8192, 8192): Tile(64, split=2),
        (128, 28672, 4096): Tile(128, 256),
        (128, 4096, 14336): Tile(128, split=3),
        (256, 57344, 8192): Tile(256, split=2),
        (1024, 28672, 4096): Tile(256),
    }
    assert {shape: choose(*shape) for shape in winners} == winners
    winners_of_half = {
        (32, 10240, 8192): Tile(32, split=4, blocks_per_sm=2),
        (64, 4096, 14336): Tile(64, split=3),
        (128, 6144, 4096): Tile(128, split=2),
        (256, 4096, 4096): Tile(128, split=2),
        (1024, 6144, 4096): Tile(256, split=2),
        (4096, 28672, 4096): Tile(256),
    }
    assert {shape: choose_half(*shape) for shape in winners_of_half} == winners_of_half
