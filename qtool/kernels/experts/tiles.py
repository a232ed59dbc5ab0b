"""The tile of a grouped GEMM, chosen without knowing how many tokens each expert has.

The constants were measured on an H200 with random routing (benchmarks/journal/kernels.md);
``benchmarks/kernels/sweep_experts.py`` times every tile.
"""

from collections.abc import Iterable
from functools import cache
from math import ceil, erfc, expm1, sqrt

from qtool.kernels.hopper.gemm import most_token_tiles
from qtool.kernels.hopper.tiles import FINISH, RESIDENT, SMALL, Tile, small_tiles, split_of

#: microseconds of a step (128 channels) if the weight's bytes are not the bound
STEP = {
    Tile(8, split=2, blocks_per_sm=2): 0.18,
    Tile(16, split=2, blocks_per_sm=2): 0.21,
    Tile(32, split=2, blocks_per_sm=2): 0.216,
    Tile(48, blocks_per_sm=2): 0.228,
    Tile(64, blocks_per_sm=2): 0.272,
    Tile(80, 256): 0.573,
    Tile(96, 256): 0.605,
    Tile(128): 0.37,
    Tile(128, 256): 0.69,
    Tile(256): 0.64,
}
#: the same with 16-bit tokens
STEP_HALF = {
    Tile(8, split=2, blocks_per_sm=2): 0.24,
    Tile(16, split=2, blocks_per_sm=2): 0.26,
    Tile(32, split=2, blocks_per_sm=2): 0.3,
    Tile(48, blocks_per_sm=2): 0.35,
    Tile(64, blocks_per_sm=2): 0.4,
    Tile(80): 0.45,
    Tile(96): 0.5,
    Tile(128): 0.6,
    Tile(256): 1.1,
}
#: the same if the main loop scales the sums of groups; no registers are left for larger tiles
STEP_HALF_SUMS = {
    Tile(8, split=2, blocks_per_sm=2): 0.24,
    Tile(16, split=2, blocks_per_sm=2): 0.26,
    Tile(32, split=2, blocks_per_sm=2): 0.3,
    Tile(48, blocks_per_sm=2): 0.4,
    Tile(64): 0.45,
    Tile(96): 0.6,
    Tile(128): 0.75,
}
#: tokens of the tiles that more than two blocks may share
SPLIT_SIZES = (8, 16, 32, 64)
#: bytes of weights that an SM takes from memory in a microsecond, all at work
BYTES_PER_US = 33.3e3


@cache
def choose_experts(
    rows: int,
    experts: int,
    n: int,
    k: int,
    stage_bytes: int,
    *,
    half: bool = False,
    scales_sums: bool = False,
) -> Tile:
    """The tile for ``rows`` tokens of ``experts``, each of whose weights is ``[n, k]``.

    Args:
        stage_bytes: bytes of 128 input channels of 128 rows of a weight.
        half: the tokens have 16 bits.
        scales_sums: they do, and the main loop scales the sums of groups with every tile.
    """
    step_us = STEP_HALF_SUMS if scales_sums else STEP_HALF if half else STEP
    steps = -(-k // 128)
    if tokens := next((size for size in SPLIT_SIZES if rows <= size), None):
        tiles = most_token_tiles(rows, experts, tokens) * -(-n // 128)
        if tiles <= RESIDENT[2]:  # too few to fill the GPU: blocks share the sum over K
            split, per_sm = split_of(tokens, tiles, steps)
            if split <= steps:
                return Tile(tokens, split=split, blocks_per_sm=per_sm)

    bytes_each = min(rows, experts) * -(-n // 128) * steps * stage_bytes / RESIDENT[1]

    def cost(tile: Tile) -> float:
        unit = tile.blocks_per_sm / tile.split  # tiles per SM at once
        tiles = token_tiles(rows, experts, tile.tokens) * -(-n // tile.rows)
        waves = unit * max(1, ceil(tiles / RESIDENT[1] / unit))
        us = waves * (steps * step_us[tile] + FINISH * tile.tokens * tile.rows / 128**2)
        return (us**8 + (bytes_each / BYTES_PER_US) ** 8) ** (1 / 8)  # a maximum, but smooth

    return min((tile for tile in step_us if tile.split <= steps), key=cost)


def token_tiles(rows: int, experts: int, tokens: int) -> float:
    """The expected number of tiles of ``tokens`` under random routing.

    The number of an expert's rows is about Poisson distributed. An expert needs another tile for
    each multiple of ``tokens`` that it exceeds; beyond the first the distribution is taken as
    normal.
    """
    mean = rows / experts
    ends = range(tokens, int(mean + 6 * sqrt(mean)) + 1, tokens)
    more = (erfc((end + 0.5 - mean) / sqrt(2 * mean)) / 2 for end in ends)
    return experts * (sum(more) - expm1(-mean))


def _table(steps: Iterable[Tile]) -> tuple[Tile, ...]:
    """The tiles of ``steps``, and the tiles for few tokens."""
    return tuple(dict.fromkeys((*steps, *small_tiles(SMALL, SPLIT_SIZES))))


#: every tile that :func:`choose_experts` may return, for tokens of 8 and of 16 bits
TABLE, TABLE_HALF, TABLE_HALF_SUMS = map(_table, (STEP, STEP_HALF, STEP_HALF_SUMS))
