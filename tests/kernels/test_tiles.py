"""The choice of tiles: always one that is compiled in CI, never more ring than shared memory."""

from hypothesis import given
from hypothesis import strategies as st

from qtool.kernels.tiles import RESIDENT, SHARED_PER_BLOCK, TABLE, TABLE_S4, choose, choose_s4


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


@given(
    m=st.integers(1, 9000),
    n=st.integers(1, 1200),
    k=st.integers(1, 600),
    group=st.sampled_from((32, 64, 128, 1024, None)),
)
def test_choice_for_s4_weights_is_in_its_table(m: int, n: int, k: int, group: int | None) -> None:
    tile = choose_s4(m, 64 * n, 64 * k, group)
    assert tile in TABLE_S4
    assert tile.tokens <= (256 if group is None else 128)
    assert -(-n // 2) * -(-m // tile.tokens) <= RESIDENT[tile.split] or tile.split == 1
