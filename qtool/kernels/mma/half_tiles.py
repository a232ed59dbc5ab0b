"""The tile that a 16-bit GEMM uses: a small table, measured on an H200.

``benchmarks/journal/kernels.md`` has the measurements.

A warp multiplies 64 output channels by ``tokens`` tokens. A team is ``column_warps`` x
``token_warps`` warps with the same input channels; the block's ``teams`` and the ``split`` blocks
share the sum over K.
"""

from dataclasses import dataclass
from functools import cache
from math import inf

MOST_STAGES = 8


@dataclass(frozen=True)
class HalfTile:
    """A tile: tokens per warp, warps along channels and tokens, teams, K split, blocks per SM."""

    tokens: int
    column_warps: int
    token_warps: int = 1
    teams: int = 1
    split: int = 1
    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.column_warps * self.token_warps * self.teams

    @property
    def columns(self) -> int:
        """Output channels of a block."""
        return 64 * self.column_warps

    @property
    def block_tokens(self) -> int:
        return self.tokens * self.token_warps

    def stages(self, stage_bytes: int, shared_bytes: int) -> int:
        """Ring slots of each team."""
        received = 4 * self.block_tokens * self.columns if self.split > 1 else 0
        return min(
            MOST_STAGES, ((shared_bytes - received - 64) // self.teams - 1024) // (stage_bytes + 8)
        )


#: Hopper's tiles for up to so many tokens, by the most tiles of 64 output channels: the weight's
#: bytes are the bound, and blocks of 64 channels are best as long as all of them run at once
HOPPER_TILES = {
    8: (
        (66, HalfTile(8, 1, teams=8, split=2, blocks_per_sm=2)),
        (132, HalfTile(8, 1, teams=8, blocks_per_sm=2)),
        (198, HalfTile(8, 1, teams=8, split=2, blocks_per_sm=3)),
        (396, HalfTile(8, 1, teams=8, blocks_per_sm=3)),
        (inf, HalfTile(8, 2, teams=8, blocks_per_sm=2)),
    ),
    16: (
        (66, HalfTile(16, 1, teams=8, split=2, blocks_per_sm=2)),
        (100, HalfTile(16, 1, teams=8, blocks_per_sm=2)),
        (132, HalfTile(16, 1, teams=8, split=2, blocks_per_sm=2)),
        (198, HalfTile(16, 1, teams=4, split=2, blocks_per_sm=3)),
        (396, HalfTile(16, 1, teams=4, blocks_per_sm=3)),
        (528, HalfTile(16, 2, teams=4, blocks_per_sm=2)),
        (inf, HalfTile(16, 1, teams=4, blocks_per_sm=3)),
    ),
}


@cache
def choose(m: int, n: int, capability: tuple[int, int]) -> HalfTile:
    """The tile for ``Y [m, n]``; on Hopper wgmma multiplies more than 16 tokens."""
    if capability != (9, 0):
        return _plain(m, n)
    tiles = HOPPER_TILES[8 if m <= 8 else 16]
    return next(tile for columns, tile in tiles if n // 64 <= columns)


def _plain(m: int, n: int) -> HalfTile:
    """The tile for GPUs other than Hopper, whose blocks have as little as 99 KB of shared memory.

    It was not measured.
    """
    if m > 32:
        return HalfTile(32, 2, token_warps=4)
    tokens = 8 if m <= 8 else 16 if m <= 16 else 32
    return HalfTile(tokens, 1, teams=8 if m <= 16 else 4, split=2 if n <= 4096 else 1)


#: every tile that :func:`choose` may return, by the architecture it is for
TABLE = {
    capability: tuple(dict.fromkeys(_plain(m, n) for m in (8, 16, 32, 64) for n in (4096, 8192)))
    for capability in ((8, 0), (8, 9), (10, 0), (12, 0))
} | {(9, 0): tuple(tile for tiles in HOPPER_TILES.values() for _, tile in tiles)}
