"""The tile that a Hopper GEMM uses: tables and a cost model of few constants.

The constants were measured by ``benchmarks/kernels/sweep.py`` on an H200.

A block multiplies ``rows`` output channels by ``tokens`` tokens. A cluster is ``split`` blocks that
share the sum over K.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import NamedTuple

SHARED_PER_BLOCK = {1: 232448, 2: 115712}  # bytes of shared memory on sm_90, by blocks per SM
MOST_STAGES = 14  # fastest among up to 24


@dataclass(frozen=True)
class Tile:
    """Tokens and output channels (128 or 256) of a block, blocks sharing K, blocks per SM."""

    tokens: int
    rows: int = 128
    split: int = 1
    blocks_per_sm: int = 1

    @property
    def panels(self) -> int:
        """The number of panels of 128 output channels."""
        return self.rows // 128

    def stages(self, weight_stage_bytes: int, staging_bytes: int) -> int:
        """Pipeline stages that fit beside the epilogue's buffers.

        With few tokens the inbox for the sums of other blocks takes room too.
        """
        fixed = 1024 + staging_bytes + 16 * self.tokens + 8
        if self.tokens * self.panels <= 128:  # else the inbox overlays the ring
            fixed += (self.split - 1) * -(-self.tokens // 8 // self.split) * self.panels * 4096
        stage = self.tokens * 128 + weight_stage_bytes + 16
        return min(MOST_STAGES, (SHARED_PER_BLOCK[self.blocks_per_sm] - fixed) // stage)


#: the number of clusters of each size that 132 SMs hold at once, as measured, with one block per
#: SM; a cluster lies within a GPC of 16 or 18 SMs
RESIDENT = {1: 132, 2: 66, 3: 32, 4: 28, 8: 12}

#: the split, and the blocks per SM
Sharing = tuple[int, int]


class Small(NamedTuple):
    """How blocks of up to 64 tokens by 128 rows share the GPU, for at most ``row_tiles`` tiles.

    ``long`` and ``short`` are for up to 32 tokens, and a K of at least :data:`LONG` steps or less;
    ``wide`` is for 64 tokens.
    """

    row_tiles: float
    long: Sharing
    short: Sharing
    wide: Sharing

    def choices(self, tokens: int) -> tuple[Sharing, ...]:
        """All that a block of ``tokens`` may get."""
        return (self.wide,) if tokens == 64 else (self.long, self.short)


#: a step is 128 input channels
LONG = 80
#: up to 64 tokens the weight's bytes are the bound, and blocks of 128 rows are best
SMALL = (
    Small(12, (8, 1), (8, 1), (8, 1)),
    Small(28, (4, 1), (4, 1), (4, 1)),
    Small(32, (6, 2), (5, 2), (3, 1)),
    Small(56, (4, 2), (4, 2), (2, 1)),
    Small(66, (2, 1), (2, 2), (2, 1)),
)
#: for more row tiles
PAIR, TWO_PAIRS, MANY = (2, 1), (2, 2), (1, 2)

#: for more tokens: microseconds of a step, by a block's tokens and rows
STEP = {(64, 128): 0.275, (128, 128): 0.341, (128, 256): 0.626, (256, 128): 0.6}
#: microseconds of finishing 128 x 128 sums, and of sending them to another block of the cluster
FINISH, ADD = 1.57, 1.45
#: clusters of two blocks: microseconds of a launch, and the factor of their time
PAIR_LAUNCH, PAIR_FACTOR = 0.3, 1.02
LARGE = tuple(Tile(*shape, split=split) for shape in STEP for split in (1, 2, 3))

#: the same for s4 weights, by the groups of a step that are scaled in the main loop (no registers
#: for more sums there)
STEP_S4 = {
    0: STEP,
    1: {(64, 128): 0.375, (128, 128): 0.63},
    2: {(64, 128): 0.54, (128, 128): 0.91},
    4: {(64, 128): 0.865, (128, 128): 1.46},
}

#: and of 16-bit tokens: with weights that are rounded or scaled by channel, and with sums of groups
#: that are scaled in the main loop
STEP_HALF = {(64, 128): 0.4, (128, 128): 0.6, (256, 128): 1.1}
STEP_HALF_SUMS = {(64, 128): 0.45, (128, 128): 0.75}
#: and of these two with 2:4 sparse weights
STEP_24 = {(64, 128): 0.3, (128, 128): 0.45, (256, 128): 0.8}
STEP_24_SUMS = {(64, 128): 0.35, (128, 128): 0.6}
SMALL_HALF = (
    Small(12, (8, 1), (8, 1), (8, 1)),
    Small(28, (4, 1), (4, 1), (4, 1)),
    Small(32, (6, 2), (6, 2), (3, 1)),
    Small(56, (4, 2), (4, 2), (2, 1)),
    Small(66, TWO_PAIRS, TWO_PAIRS, PAIR),
    Small(99, (4, 2), (4, 2), (4, 2)),
    Small(inf, TWO_PAIRS, TWO_PAIRS, TWO_PAIRS),
)


@cache
def choose(m: int, n: int, k: int) -> Tile:
    """The tile for ``Y [m, n]`` with ``k`` input channels."""
    return _choose(m, n, k, STEP)


@cache
def choose_s4(m: int, n: int, k: int, group_size: int | None, split_k: bool = True) -> Tile:
    """The tile for s4 weights with a scale for each ``group_size`` input channels.

    ``None`` means one scale for all. ``split_k``: several blocks may share the sum over K.
    """
    tile = _choose(m, n, k, STEP_S4[0 if group_size is None else max(1, 128 // group_size)])
    if tile.split > 1 and not split_k:
        tile = replace(tile, split=1, blocks_per_sm=2 if tile.tokens <= 64 else 1)
    return replace(tile, blocks_per_sm=1) if tile.tokens == 64 else tile


@cache
def choose_half(m: int, n: int, k: int, *, scales_sums: bool = False, sparse: bool = False) -> Tile:
    """The tile for more than 16 tokens of 16 bits.

    ``scales_sums``: the main loop scales the sums of groups with every tile. ``sparse``: the weight
    is 2:4 sparse.
    """
    plain, sums = (STEP_24, STEP_24_SUMS) if sparse else (STEP_HALF, STEP_HALF_SUMS)
    tile = _choose(max(m, 17), n, k, sums if scales_sums else plain, SMALL_HALF)
    return replace(tile, blocks_per_sm=1) if tile.tokens == 64 and scales_sums else tile


def _choose(
    m: int,
    n: int,
    k: int,
    step_us: Mapping[tuple[int, int], float],
    small: Sequence[Small] = SMALL,
) -> Tile:
    row_tiles, steps = -(-n // 128), -(-k // 128)
    if m <= 64:
        tokens = next(size for size in (8, 16, 32, 64) if m <= size)
        split, per_sm = split_of(tokens, row_tiles, steps, small)
        if split > steps:
            return Tile(tokens, blocks_per_sm=2)
        return Tile(tokens, split=split, blocks_per_sm=per_sm)

    def cost(tile: Tile) -> float:
        """Microseconds: each block of a cluster takes whole tiles, and all share the last one."""
        tiles = -(-n // tile.rows) * -(-m // tile.tokens)
        if tile.split > 2 and tiles > RESIDENT[tile.split]:
            return inf  # these clusters hold one tile: the next wave starts cold
        blocks = tile.tokens * tile.rows / 128**2
        tile_us = steps * step_us[tile.tokens, tile.rows] + FINISH * blocks
        whole, shared = divmod(-(-tiles // RESIDENT[tile.split]), tile.split)
        us = whole * tile_us
        if shared:
            us += tile_us / tile.split + ADD * blocks * (tile.split - 1)
        return PAIR_LAUNCH + us * PAIR_FACTOR if tile.split == 2 else us

    return min(
        (tile for tile in LARGE if (tile.tokens, tile.rows) in step_us and tile.split <= steps),
        key=cost,
    )


def split_of(tokens: int, row_tiles: int, steps: int, small: Sequence[Small] = SMALL) -> Sharing:
    """The split and the blocks per SM for blocks of up to 64 tokens by 128 rows."""
    for row in small:
        if row_tiles <= row.row_tiles:
            return row.choices(tokens)[0 if steps >= LONG else -1]
    if -(-row_tiles // RESIDENT[2]) % 2:
        return PAIR  # a pair's last tile is split, and the SMs have equal shares
    if tokens == 64:
        return MANY if row_tiles > RESIDENT[1] else PAIR
    return TWO_PAIRS


def small_tiles(
    small: Sequence[Small], widths: Sequence[int], more: Iterable[Sharing] = ()
) -> tuple[Tile, ...]:
    """The tiles of ``widths`` tokens in ``small``, and those of ``more``."""
    return tuple(
        Tile(tokens, split=split, blocks_per_sm=per_sm)
        for tokens in widths
        for split, per_sm in sorted({*more, *(own for row in small for own in row.choices(tokens))})
    )


def _table(
    small: Sequence[Small], widths: Sequence[int], steps: Mapping[tuple[int, int], float]
) -> tuple[Tile, ...]:
    """The tiles for many tokens, and those of ``widths`` for few."""
    large = tuple(tile for tile in LARGE if (tile.tokens, tile.rows) in steps)
    return large + small_tiles(small, widths, (PAIR, TWO_PAIRS, MANY))


#: every tile that :func:`choose` may return
TABLE = _table(SMALL, (8, 16, 32, 64), STEP)
#: every tile that :func:`choose_half` may return
TABLE_HALF = _table(SMALL_HALF, (32, 64), STEP_HALF)
#: every tile that :func:`choose_s4` may return; with groups up to 128 x 128 sums
TABLE_S4 = tuple(tile for tile in TABLE if tile.tokens != 64 or tile.blocks_per_sm == 1)
