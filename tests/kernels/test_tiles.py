"""The choice of tiles: always one that is compiled in CI, never more ring than shared memory."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from qtool.kernels.hopper import w4a8, w8a8
from qtool.kernels.hopper.gemm import staging_bytes
from qtool.kernels.hopper.tiles import (
    RESIDENT,
    SHARED_PER_BLOCK,
    TABLE,
    TABLE_S4,
    Tile,
    choose,
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
    whole = choose_s4(m, 64 * n, 64 * k, group, whole=True)
    assert whole in TABLE_S4 and (whole.split, whole.tokens) == (1, tile.tokens)


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
