"""Time every tile on every shape: the measurement behind ``qtool/kernels/hopper/tiles.py``.

python benchmarks/kernels/sweep.py [--models llama-3-8b] [--tokens 16,64] [--json FILE]
"""

import argparse
import itertools
import json
import sys

import torch

from qtool.bench.cuda_graphs import floor_us, graph_us
from qtool.bench.gemm import MODELS
from qtool.bench.gemm_columns import S4_LAYOUTS, Column
from qtool.kernels.build import compile_all
from qtool.kernels.hopper.gemm import definition
from qtool.kernels.hopper.tiles import Tile

# rows, split, blocks per SM
SMALL = (
    [(128, s, 2) for s in (1, 2, 4, 5, 6, 7)]
    + [(128, s, 1) for s in (1, 2, 3, 4)]
    + [(256, s, 1) for s in (1, 2, 3)]
)
LARGE = [(rows, s, 1) for rows in (128, 256) for s in (1, 2, 3)]


def tiles(m: int, s4_groups: bool) -> list[Tile]:
    """Tiles worth trying for ``m`` tokens; groups of s4 weights leave few registers."""
    exact = next((size for size in (8, 16, 32, 64, 128) if m <= size), 128 if s4_groups else 256)
    widths = {exact} | ({exact // 2} if m >= 64 else set())
    pairs = itertools.chain.from_iterable(
        ((w, c) for c in (SMALL if w <= 64 else LARGE)) for w in sorted(widths)
    )
    candidates = (Tile(w, *c) for w, c in pairs if w * c[0] <= 256 * 128)
    if not s4_groups:
        return list(candidates)
    return [
        tile
        for tile in candidates
        if tile.rows == 128 and (tile.tokens * tile.blocks_per_sm < 128 or tile.blocks_per_sm == 1)
    ]


def describe(tile: Tile, overlap: bool) -> str:
    return f"{tile.tokens},{tile.rows},{tile.split},{tile.blocks_per_sm}{'' if overlap else ',no'}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="llama-3-8b")
    parser.add_argument("--tokens", default="1,16,32,64,128,256,1024,4096")
    parser.add_argument("--scheme", default="w4a8-lqq")
    parser.add_argument("--group", type=lambda g: int(g) or None, default=64, help="0: per channel")
    parser.add_argument("--json")
    parser.add_argument("--both", action="store_true", help="also without overlapping launches")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("sweep.py: a CUDA device is needed")
    sizes = [int(m) for m in args.tokens.split(",")]
    s4_groups = args.scheme in S4_LAYOUTS and args.group is not None
    wanted = sorted({t for m in sizes for t in tiles(m, s4_groups)}, key=str)
    column = Column(args.scheme, args.group, 4.0)
    operand = column.operand()
    compile_all((definition(operand, tile, torch.bfloat16) for tile in wanted), "sm_90a")
    results = []
    for model in args.models.split(","):
        for name, (n, k) in MODELS[model].items():
            weights = column.weights(n, k)
            for m in sizes:
                rows = []
                for tile, overlap in itertools.product(
                    tiles(m, s4_groups), (True, False) if args.both else (True,)
                ):
                    us = graph_us(column.calls(weights, m, n, k, tile, overlap), replays=7)
                    rows.append((us, tile, overlap))
                    results.append([model, name, m, n, k, str(tile), overlap, us])
                rows.sort(key=lambda row: row[0])
                best = "  ".join(
                    f"{us:.1f}[{describe(tile, overlap)}]" for us, tile, overlap in rows[:5]
                )
                print(
                    f"{model} {name:8} M={m:5} floor {floor_us(m, n, k, 4.25):6.1f}  {best}",
                    flush=True,
                )
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
