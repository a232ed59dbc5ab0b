"""Which tile a 16-bit GEMM uses.

A warp multiplies 64 output channels by ``tokens`` tokens. A team is ``column_warps`` x ``token_warps`` warps with
the same input channels; the block's ``teams`` and the ``split`` blocks share the sum over K.
"""

from dataclasses import dataclass
from functools import cache

MOST_STAGES = 8


@dataclass(frozen=True)
class HalfTile:
    """Tokens a warp, warps along the channels and along the tokens, teams, blocks sharing K, blocks per SM."""

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
        return min(MOST_STAGES, shared_bytes // (self.teams * stage_bytes))


@cache
def choose(m: int, n: int, k: int) -> HalfTile:
    """The tile for ``Y [m, n]`` with ``k`` input channels."""
    if m <= 16:
        return HalfTile(8 if m <= 8 else 16, 4, teams=2, split=4 if n <= 8192 else 1, blocks_per_sm=2)
    return HalfTile(32, 2, token_warps=1 if m <= 32 else 2 if m <= 64 else 4)


TABLE = {
    (9, 0): (HalfTile(32, 2), HalfTile(32, 2, token_warps=4), HalfTile(16, 4, teams=2, split=4, blocks_per_sm=2)),
}
