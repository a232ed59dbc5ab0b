"""Time every tile of the W4A16 kernels on a layer's shapes: the measurement behind
``qtool/kernels/mma/half_tiles.py`` and ``choose_half`` of ``qtool/kernels/hopper/tiles.py``.

python benchmarks/kernels/sweep_half.py [--model llama-3-8b] [--tokens 16,64] [--sparse]
"""

import argparse
import itertools
import sys
from functools import partial

import torch
from check_w4a16 import CAPABILITY, AnyTile, launch, source

from qtool.bench.cuda_graphs import floor_us, graph_us
from qtool.bench.gemm import MODELS
from qtool.bench.gemm_columns import HalfColumn
from qtool.kernels.build import compile_all
from qtool.kernels.hopper.tiles import Tile
from qtool.kernels.mma.half_gemm import Variant, shared_bytes
from qtool.kernels.mma.half_tiles import HalfTile

MULTIPROCESSORS = 132


def tiles(m: int, variant: Variant) -> list[HalfTile]:
    """Tiles worth trying for ``m`` tokens: at least 8 warps a multiprocessor, as many as their
    registers allow.
    """
    tokens = next((size for size in (8, 16, 32) if m <= size), 32)
    most_threads = {8: 1024, 16: 512, 32: 256}[tokens]
    token_warps = (1,) if m <= 32 else (1, 2, 4)
    choices = itertools.product(
        (1, 2, 4), token_warps, (1, 2, 4, 8, 12, 16), (1, 2, 3, 4, 6, 8), (1, 2, 3)
    )
    made = (HalfTile(tokens, *choice) for choice in choices)
    return [
        tile
        for tile in made
        if tile.threads <= 512
        and 256 <= tile.threads * tile.blocks_per_sm <= most_threads
        and tile.stages(variant.stage_bytes(tile), shared_bytes(tile, CAPABILITY)) >= 2
    ]


def wgmma_tiles(m: int) -> list[Tile]:
    """Tiles of the wgmma kernel worth trying for ``m`` tokens."""
    widths = [size for size in (32, 64, 128, 256) if size < 2 * max(m, 17)]
    few = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (4, 2), (6, 2)]
    return [
        Tile(width, split=split, blocks_per_sm=per_sm)
        for width in widths[-3:]
        for split, per_sm in (few if width <= 64 else few[:3])
    ]


def fills(tile: HalfTile, m: int, n: int) -> bool:
    """Whether the tile's blocks fill half of the chip, and its clusters at most two waves."""
    blocks = -(-n // tile.columns) * -(-m // tile.block_tokens) * tile.split
    return blocks >= MULTIPROCESSORS // 2 and (
        tile.split == 1 or blocks <= 2 * MULTIPROCESSORS * tile.blocks_per_sm
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--tokens", default="8,16,32,64,128")
    parser.add_argument("--sparse", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("sweep_half.py: a CUDA device is needed")
    bf16 = torch.bfloat16
    column = HalfColumn(args.sparse, 128, 3.125 if args.sparse else 4.125)
    variant = Variant(args.sparse, 128, bf16, bf16, bf16)
    sizes = [int(m) for m in args.tokens.split(",")]
    wanted: set[AnyTile] = {tile for m in sizes for tile in tiles(m, variant)}
    wanted |= {tile for m in sizes for tile in wgmma_tiles(m)}
    compile_all((source(variant, tile, hopper=True) for tile in wanted), "sm_90a")
    for name, (n, k) in MODELS[args.model].items():
        weights = column.weights(n, k)
        for m in sizes:
            x = torch.randn(m, k, device="cuda").to(bf16)
            out = torch.empty(m, n, dtype=bf16, device="cuda")

            def microseconds(tile: AnyTile, x: torch.Tensor = x, out: torch.Tensor = out) -> float:
                launched = partial(launch, tile, x, out=out, bias=None, hopper=True)
                return graph_us([partial(launched, weight=w) for w in weights], replays=5)  # noqa: B023

            rows = sorted(
                (microseconds(tile), str(tile))
                for tile in (
                    *(tile for tile in tiles(m, variant) if fills(tile, m, n)),
                    *wgmma_tiles(m),
                )
            )
            print(f"{name} M={m} floor {floor_us(m, n, k, column.bits):.1f}")
            print("".join(f"  {us:6.2f} {tile}\n" for us, tile in rows[:5]), end="", flush=True)


if __name__ == "__main__":
    main()
