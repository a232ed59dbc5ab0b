"""Time every tile on every shape: the measurement behind ``qtool/kernels/tiles.py``.

    python benchmarks/kernels/sweep.py [--models llama-3-8b] [--tokens 16,64] [--json FILE]
"""

import argparse
import itertools
import json
import sys
from concurrent.futures import ProcessPoolExecutor

import torch

from qtool.kernels.bench import MODELS, W4A8Weights, floor_us, graph_us
from qtool.kernels.build import cubin
from qtool.kernels.gemm import definition
from qtool.kernels.tiles import Tile
from qtool.kernels.w4a8 import operand

# rows, split, blocks per SM
SMALL = [(1, s, 2) for s in range(1, 9)] + [(2, s, 2) for s in (1, 2, 4)] + [(1, s, 1) for s in (1, 2, 3, 4)] + [(2, 1, 1)]
LARGE = [(1, s, 1) for s in (1, 2, 3, 4)] + [(2, 1, 1), (2, 2, 1)]


def tiles(m: int) -> list[Tile]:
    """Tiles worth trying for ``m`` tokens."""
    exact = next((size for size in (8, 16, 32, 64, 128) if m <= size), 256)
    widths = {exact} | ({exact // 2} if m >= 64 else set())
    pairs = itertools.chain.from_iterable(((w, c) for c in (SMALL if w <= 64 else LARGE)) for w in sorted(widths))
    return [Tile(w, *c) for w, c in pairs if w // c[0] >= 8]


def compile_one(job: tuple[str, int, Tile]) -> None:
    scheme, group, tile = job
    cubin(*definition(operand(scheme, group), tile, torch.bfloat16), "sm_90a")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="llama-3-8b")
    parser.add_argument("--tokens", default="1,16,32,64,128,256,1024,4096")
    parser.add_argument("--scheme", default="w4a8-lqq")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--json")
    parser.add_argument("--both", action="store_true", help="also without overlapping launches")
    args = parser.parse_args()
    sizes = [int(m) for m in args.tokens.split(",")]
    wanted = sorted({t for m in sizes for t in tiles(m)}, key=str)
    with ProcessPoolExecutor(16) as pool:
        list(pool.map(compile_one, [(args.scheme, args.group, t) for t in wanted]))
    results = []
    for model in args.models.split(","):
        for name, (n, k) in MODELS[model].items():
            weights = W4A8Weights.random(args.scheme, args.group, n, k)
            for m in sizes:
                rows = []
                for tile, overlap in itertools.product(tiles(m), (True, False) if args.both else (True,)):
                    us = graph_us(weights.calls(m, tile, overlap), replays=7)
                    rows.append((us, tile, overlap))
                    results.append([model, name, m, n, k, str(tile), overlap, us])
                rows.sort(key=lambda row: row[0])
                best = "  ".join(f"{u:.1f}[{t.tokens},{t.rows},{t.split},{t.blocks_per_sm}{'' if o else ',no'}]" for u, t, o in rows[:5])
                print(f"{model} {name:8} M={m:5} floor {floor_us(m, n, k, 4.25):6.1f}  {best}", flush=True)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    sys.exit(main())
