"""Which tile a GEMM uses: a small table, measured (``benchmarks/kernels/notes.md``).

A block multiplies 128 output channels by ``tokens`` tokens. A cluster is ``rows`` blocks of different
channels that share the tokens, times ``split`` blocks that share the sum over K.
"""

from dataclasses import dataclass

SHARED_PER_BLOCK = {1: 232448, 2: 115712}  # bytes of shared memory on sm_90, by blocks per SM


@dataclass(frozen=True)
class Tile:
    """Tokens per block, blocks sharing tokens, blocks sharing K, blocks per SM, most ring stages."""

    tokens: int
    rows: int = 1
    split: int = 1
    blocks_per_sm: int = 1
    most_stages: int = 16

    def stages(self, weight_stage_bytes: int, staging_bytes: int) -> int:
        """Ring slots that fit beside the epilogue's memory."""
        fixed = 1024 + 2 * staging_bytes + 16 * self.tokens
        stage = self.tokens * 128 + weight_stage_bytes + 16
        return min(self.most_stages, (SHARED_PER_BLOCK[self.blocks_per_sm] - fixed) // stage)


def choose(m: int, n: int, k: int) -> Tile:
    """The tile for ``Y [m, n]`` with ``k`` input channels."""
    tokens = next((size for size in (8, 16, 32, 64, 128) if m <= size), 256)
    row_tiles = (n + 127) // 128
    blocks = row_tiles * -(-m // tokens)
    if tokens <= 64:
        split = next((s for s in (8, 4, 2) if blocks * s <= 264 and k >= 512 * s), 1)
        return Tile(tokens, split=split, blocks_per_sm=2)
    if tokens == 128:
        split = next((s for s in (4, 2) if blocks * s <= 132), 1)
        return Tile(tokens, split=split)
    return Tile(256, rows=2 if row_tiles % 2 == 0 else 1)
