"""Which tile a GEMM uses: tables and a cost of few constants, measured by ``benchmarks/kernels/sweep.py`` on an H200.

A block multiplies 128 output channels by ``tokens`` tokens. A cluster is ``rows`` blocks of different
channels that share the tokens, times ``split`` blocks that share the sum over K.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import inf

SHARED_PER_BLOCK = {1: 232448, 2: 115712}  # bytes of shared memory on sm_90, by blocks per SM
MOST_STAGES = 24


@dataclass(frozen=True)
class Tile:
    """Tokens per block, blocks sharing tokens, blocks sharing K, blocks per SM."""

    tokens: int
    rows: int = 1
    split: int = 1
    blocks_per_sm: int = 1

    def stages(self, weight_stage_bytes: int, staging_bytes: int) -> int:
        """Ring slots that fit beside the epilogue's memory."""
        fixed = 1024 + 2 * (staging_bytes + 8 * self.tokens)
        stage = self.tokens * 128 + weight_stage_bytes + 16
        return min(MOST_STAGES, (SHARED_PER_BLOCK[self.blocks_per_sm] - fixed) // stage)


#: clusters of each size that 132 SMs hold at once, at one block an SM: a cluster lies within a GPC of 16 or 18
RESIDENT = {1: 132, 2: 66, 3: 42, 4: 28, 8: 12}

#: up to 64 tokens the weight's bytes are the bound: as many blocks as are resident, then (split, blocks per SM)
SMALL = ((12, 8, 1), (28, 4, 1), (42, 3, 1), (66, 2, 1), (132, 1, 1))
MANY = (1, 2)

#: above, microseconds of a step (128 channels) by tokens, of finishing a tile, of adding a split's sums (a token)
STEP = {64: 0.25, 128: 0.33, 256: 0.594}
FINISH, ADD = 1.0, 1.25 / 128
LARGE = tuple(Tile(tokens, split=split) for tokens in STEP for split in (1, 2, 3, 4))


#: the same for s4 weights, by the groups of a step that are scaled in the main loop (no registers for 256 tokens there)
STEP_S4 = {0: STEP, 1: {64: 0.375, 128: 0.63}, 2: {64: 0.54, 128: 0.91}, 4: {64: 0.865, 128: 1.46}}


@cache
def choose(m: int, n: int, k: int) -> Tile:
    """The tile for ``Y [m, n]`` with ``k`` input channels."""
    return _choose(m, n, k, STEP)


@cache
def choose_s4(m: int, n: int, k: int, group_size: int | None) -> Tile:
    """The same for s4 weights, where every ``group_size`` input channels have a scale of their own; ``None``: all."""
    tile = _choose(m, n, k, STEP_S4[0 if group_size is None else max(1, 128 // group_size)])
    return replace(tile, blocks_per_sm=1) if tile.tokens == 64 else tile


def _choose(m: int, n: int, k: int, step_us: Mapping[int, float]) -> Tile:
    row_tiles, steps = -(-n // 128), -(-k // 128)
    if m <= 64:
        tokens = next(size for size in (8, 16, 32, 64) if m <= size)
        split, per_sm = next((choice for most, *choice in SMALL if row_tiles <= most and choice[0] <= steps), MANY)
        return Tile(tokens, split=split, blocks_per_sm=per_sm)

    large = [tile for tile in LARGE if tile.tokens in step_us]

    def cost(tile: Tile) -> float:
        waves = -(-row_tiles * -(-m // tile.tokens) // RESIDENT[tile.split])
        if tile.split > 1 and waves > 1:
            return inf  # a cluster holds one tile: the next wave starts cold
        return waves * (steps / tile.split * step_us[tile.tokens] + FINISH) + ADD * tile.tokens * (tile.split - 1)

    return min(large, key=cost)


#: every tile that :func:`choose` may return
TABLE = LARGE + tuple(
    Tile(tokens, split=split, blocks_per_sm=per_sm)
    for tokens in (8, 16, 32, 64)
    for split, per_sm in (*(choice for _, *choice in SMALL), MANY)
)
#: and :func:`choose_s4`; in groups up to 128 tokens
TABLE_S4 = tuple(tile for tile in TABLE if tile.tokens != 64 or tile.blocks_per_sm == 1)
