"""How attention over a packed cache is cut into blocks, rings and splits."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch

from qtool.kernels.build import ARCHS, Build, Source
from qtool.kernels.dtypes import NUMBERS

WARPS = 4
MOST_SPLITS = 64
#: the most rounds of tiles of a split, if only the GPU knows the lengths
LONGEST = 256


@dataclass(frozen=True)
class Plan:
    """How one block of the attention kernel is built.

    It has ``row_tiles`` tiles of 8 query rows, ``tile`` tokens per stage and ``stages`` in each
    ring.
    """

    bits: int
    dim: int
    row_tiles: int
    tile: int
    stages: int
    blocks_per_sm: int

    @classmethod
    def of(cls, bits: int, dim: int, rows: int) -> "Plan":
        """The measured choice for ``rows`` query rows per kv head."""
        row_tiles = 1 if rows <= 8 or dim > 128 else 2
        tile = 16 if bits * dim > 1024 else 32
        blocks = 2 if row_tiles == 2 or bits * dim > 512 else 4
        return cls(bits, dim, row_tiles, tile, 2 if bits == 4 else 3, blocks)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the rings, and later the exchange between warps."""
        stage = 2 * self.tile * self.dim * self.bits // 8 + (8 * self.tile if self.bits == 4 else 0)
        return max(WARPS * self.stages * stage, WARPS * 8 * self.row_tiles * (self.dim + 6) * 4)

    def row_blocks(self, rows: int) -> int:
        """Blocks that share a kv head's query rows."""
        return -(-rows // (8 * self.row_tiles))

    def splits(self, blocks: int, tokens: int, processors: int) -> int:
        """The number of parts to cut the tokens into: the one with the fewest rounds of tiles.

        A split's own cost counts as two tiles.
        """
        rounds = -(-tokens // (self.tile * WARPS))
        room = processors * self.blocks_per_sm

        def cost(splits: int) -> tuple[int, int]:
            waves = -(-blocks * splits // room)
            return waves * (-(-rounds // splits) + 2), splits

        return min(range(1, max(1, min(rounds, MOST_SPLITS)) + 1), key=cost)

    def paged_splits(self, blocks: int, capacity: int, processors: int) -> tuple[int, int]:
        """Splits for sequences of any length up to ``capacity``: the fewest, and the most.

        The fewest fill the GPU. A sequence that is much longer than the others is cut further,
        since otherwise its blocks would run while all others are done.
        """
        fewest = self.splits(blocks, capacity, processors)
        longest = min(MOST_SPLITS, -(-capacity // (self.tile * WARPS * LONGEST)))
        return fewest, max(fewest, longest)


def definition(
    plan: Plan, dtype: torch.dtype, masked: bool, capped: bool, paged: bool = False
) -> Source:
    """Source name, prologue and macros of one kernel."""
    defines = {"BITS": plan.bits, "DIM": plan.dim, "ROW_TILES": plan.row_tiles, "TILE": plan.tile}
    defines |= {
        "STAGES": plan.stages,
        "WARPS": WARPS,
        "MOST_SPLITS": MOST_SPLITS,
        "LONGEST": LONGEST,
        "MIN_BLOCKS": plan.blocks_per_sm,
        "DTYPE": NUMBERS[dtype],
    }
    variant = {"MASKED": int(masked), "CAPPED": int(capped), "PAGED": int(paged)}
    return "attention/kv_attention", "", defines | variant


def builds() -> Iterator[Build]:
    """Both caches at few and many query rows, dense and paged.

    Hopper gets all widths, the other architectures the longest variants.
    """
    cases = [("sm_90a", dim, False, paged) for dim in (64, 80, 128, 256) for paged in (False, True)]
    cases += [(a, 128, True, paged) for a in ARCHS for paged in (False, True)]
    for (arch, dim, special, paged), bits, rows in product(cases, (4, 8), (4, 16)):
        plan, masked = Plan.of(bits, dim, rows), special and not paged
        variant = " paged" * paged + " masked" * masked + " capped" * special
        name = f"kv_attention kv{bits} D={dim} rows={rows}{variant}"
        source = definition(plan, torch.bfloat16, masked, special, paged)
        threads = 32 * WARPS * plan.blocks_per_sm
        exits = arch != "sm_90a"  # a loop's exit is coded as a call there
        yield Build(name, arch, source, threads, ("HMMA.16816.F32",), calls=exits)
