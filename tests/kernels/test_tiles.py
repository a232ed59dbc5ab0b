"""The choice of tiles: always one that is compiled in CI, never more ring than shared memory."""

from hypothesis import given
from hypothesis import strategies as st

from qtool.kernels.tiles import RESIDENT, SHARED_PER_BLOCK, TABLE, choose


@given(m=st.integers(1, 9000), n=st.integers(1, 1200), k=st.integers(1, 600))
def test_choice_is_in_the_table_and_fits(m: int, n: int, k: int) -> None:
    tile = choose(m, 64 * n, 64 * k)
    assert tile in TABLE
    assert tile.tokens >= min(m, 64)
    assert tile.split <= max(1, k)
    blocks = -(-n // 2) * -(-m // tile.tokens)
    assert tile.split == 1 or blocks <= RESIDENT[tile.split]
    stage = tile.tokens * 128 + 16384
    assert tile.stages(stage - tile.tokens * 128, 9000) >= 3
    assert tile.stages(stage - tile.tokens * 128, 9000) * stage <= SHARED_PER_BLOCK[tile.blocks_per_sm]
