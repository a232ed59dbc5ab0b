"""The tile that a Hopper GEMM uses: tables and a cost model of few constants.

The constants were measured by ``benchmarks/kernels/sweep.py`` on an H200.

A block multiplies ``rows`` output channels by ``tokens`` tokens. A cluster is ``split`` blocks that
share the sum over K.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf

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

#: most row tiles, then splits and blocks per SM
Small = tuple[tuple[float, tuple[int, int], tuple[int, int], tuple[int, int]], ...]
#: up to 64 tokens the weight's bytes are the bound, and blocks of 128 rows are best. An entry
#: gives, for at most so many row tiles, the split and the blocks per SM: for a long K (in steps)
#: and for other K with up to 32 tokens, and for 64 tokens
SMALL: Small = (
    (12, (8, 1), (8, 1), (8, 1)),
    (28, (4, 1), (4, 1), (4, 1)),
    (32, (6, 2), (5, 2), (3, 1)),
    (56, (4, 2), (4, 2), (2, 1)),
    (66, (2, 1), (2, 2), (2, 1)),
)
LONG = 80
PAIR, TWO_PAIRS, MANY = (2, 1), (2, 2), (1, 2)

#: above, microseconds of a step (128 channels) by tokens and rows; of finishing 128 x 128 sums; of
#: sending them to another block; of pairs of blocks, a launch and the factor
STEP = {(64, 128): 0.275, (128, 128): 0.341, (128, 256): 0.626, (256, 128): 0.6}
FINISH, ADD, PAIRS = 1.57, 1.45, (0.3, 1.02)
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
SMALL_HALF: Small = (
    (12, (8, 1), (8, 1), (8, 1)),
    (28, (4, 1), (4, 1), (4, 1)),
    (32, (6, 2), (6, 2), (3, 1)),
    (56, (4, 2), (4, 2), (2, 1)),
    (66, TWO_PAIRS, TWO_PAIRS, PAIR),
    (99, (4, 2), (4, 2), (4, 2)),
    (inf, TWO_PAIRS, TWO_PAIRS, TWO_PAIRS),
)


@cache
def choose(m: int, n: int, k: int) -> Tile:
    """The tile for ``Y [m, n]`` with ``k`` input channels."""
    return _choose(m, n, k, STEP)


@cache
def choose_s4(m: int, n: int, k: int, group_size: int | None, whole: bool = False) -> Tile:
    """The tile for s4 weights with a scale for each ``group_size`` input channels.

    ``None`` means one scale for all. ``whole``: no blocks share the sum over K.
    """
    tile = _choose(m, n, k, STEP_S4[0 if group_size is None else max(1, 128 // group_size)])
    if whole and tile.split > 1:
        tile = replace(tile, split=1, blocks_per_sm=2 if tile.tokens <= 64 else 1)
    return replace(tile, blocks_per_sm=1) if tile.tokens == 64 else tile


@cache
def choose_half(m: int, n: int, k: int, *, scales_sums: bool = False, sparse: bool = False) -> Tile:
    """The tile for more than 16 tokens of 16 bits.

    ``scales_sums``: the main loop scales the sums of groups with every tile. ``sparse``: the weight
    is 2:4 sparse.
    """
    dense = STEP_HALF_SUMS if scales_sums else STEP_HALF
    step_us = dense if not sparse else STEP_24_SUMS if scales_sums else STEP_24
    tile = _choose(max(m, 17), n, k, step_us, SMALL_HALF)
    return replace(tile, blocks_per_sm=1) if tile.tokens == 64 and scales_sums else tile


def _choose(
    m: int, n: int, k: int, step_us: Mapping[tuple[int, int], float], small: Small = SMALL
) -> Tile:
    row_tiles, steps = -(-n // 128), -(-k // 128)
    if m <= 64:
        tokens = next(size for size in (8, 16, 32, 64) if m <= size)
        split, per_sm = split_of(tokens, row_tiles, steps, small)
        return (
            Tile(tokens, split=split, blocks_per_sm=per_sm)
            if split <= steps
            else Tile(tokens, blocks_per_sm=2)
        )

    def cost(tile: Tile) -> float:
        tiles = -(-n // tile.rows) * -(-m // tile.tokens)
        if tile.split > 2 and tiles > RESIDENT[tile.split]:
            return inf  # these clusters hold one tile: the next wave starts cold
        blocks = tile.tokens * tile.rows / 128**2
        whole, shared = divmod(-(-tiles // RESIDENT[tile.split]), tile.split)
        us = whole * (steps * step_us[tile.tokens, tile.rows] + FINISH * blocks)
        if shared:
            share = (steps * step_us[tile.tokens, tile.rows] + FINISH * blocks) / tile.split
            us += share + ADD * blocks * (tile.split - 1)
        return PAIRS[0] + us * PAIRS[1] if tile.split == 2 else us

    return min(
        (tile for tile in LARGE if (tile.tokens, tile.rows) in step_us and tile.split <= steps),
        key=cost,
    )


def split_of(tokens: int, row_tiles: int, steps: int, small: Small = SMALL) -> tuple[int, int]:
    """The split and the blocks per SM for blocks of up to 64 tokens by 128 rows."""
    for most, long, short, wide in small:
        if row_tiles <= most:
            return wide if tokens == 64 else long if steps >= LONG else short
    if -(-row_tiles // 66) % 2:  # a pair's last tile is split, and the SMs have equal shares
        return PAIR
    if tokens == 64:
        return MANY if row_tiles > 132 else PAIR
    return TWO_PAIRS


def _table(
    small: Small, widths: tuple[int, ...], steps: Mapping[tuple[int, int], float]
) -> tuple[Tile, ...]:
    """The tiles of ``widths`` in a table for few tokens, and the tiles for many tokens."""
    large = tuple(tile for tile in LARGE if (tile.tokens, tile.rows) in steps)
    return large + tuple(
        Tile(tokens, split=split, blocks_per_sm=per_sm)
        for tokens in widths
        for split, per_sm in sorted(
            {choice for row in small for choice in (row[3:] if tokens == 64 else row[1:3])}
            | {PAIR, TWO_PAIRS, MANY}
        )
    )


#: every tile that :func:`choose` may return
TABLE = _table(SMALL, (8, 16, 32, 64), STEP)
#: every tile that :func:`choose_half` may return
TABLE_HALF = _table(SMALL_HALF, (32, 64), STEP_HALF)
#: every tile that :func:`choose_s4` may return; with groups up to 128 x 128 sums
TABLE_S4 = tuple(tile for tile in TABLE if tile.tokens != 64 or tile.blocks_per_sm == 1)
