"""Time every tile of the grouped GEMMs: the measurement behind ``qtool/kernels/experts/tiles.py``.

    python benchmarks/kernels/sweep_experts.py [--scheme w4a16] [--models qwen3-30b-a3b]
    [--tokens 16,64]

It times one GEMM with the preparation of its rows, which takes the same time for every tile, over
random routing and several copies of the weights. It prints the tile that the op chooses and the
five best.
"""

import argparse
import sys
from functools import partial
from unittest.mock import patch

import torch
from bench_experts import MODELS, SCHEMES, chosen, operand, random_stack, routed

from qtool.bench.cuda_graphs import copies, graph_us
from qtool.kernels.build import compile_all
from qtool.kernels.experts import tiles, w4a8, w4a16, w8a8
from qtool.kernels.experts.route import route_experts
from qtool.kernels.hopper.gemm import definition
from qtool.kernels.hopper.tiles import Tile

#: by scheme, the module of the op and the name of the function that chooses its tile
OPS = {"w4a16": (w4a16, "choose"), "w8a8": (w8a8, "choose_experts")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scheme", default="w4a16", choices=SCHEMES)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="16,64,128,256,1024")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("sweep_experts.py: a CUDA device is needed")
    scheme, sizes = arguments.scheme, list(map(int, arguments.tokens.split(",")))
    known = list(tiles.STEP_HALF if scheme == "w4a16" else tiles.STEP)
    compile_all(
        (definition(operand(scheme, tile), tile, torch.bfloat16) for tile in known), "sm_90a"
    )
    op = OPS.get(scheme, (w4a8, "choose_experts"))
    for model in arguments.models.split(","):
        shape = MODELS[model]
        for n, k in shape.sizes():
            count = copies(shape.experts * n * k * SCHEMES[scheme][1] / 8)
            stacks = [random_stack(scheme, shape.experts, n, k) for _ in range(count)]
            for tokens in sizes:
                torch.manual_seed(tokens)
                calls, rows = [], tokens * shape.top
                for stack in stacks:
                    offsets, _ = route_experts(routed(shape, tokens)[2], None, shape.experts)
                    x = torch.randn(rows, k, device="cuda").bfloat16()
                    calls.append(partial(stack.multiply, x, None, offsets))

                def microseconds(tile: Tile) -> float:
                    with patch.object(*op, lambda *_: tile):
                        return graph_us(calls, replays=7)  # noqa: B023

                own = chosen(scheme, rows, shape.experts, n, k)
                mean = rows / shape.experts
                tried = [tile for tile in known if mean / 4 <= tile.tokens <= 4 * mean + 16]
                tried = [tile for tile in {*tried, own} if tile.split <= -(-k // 128)]
                times = {tile: microseconds(tile) for tile in tried}
                best = sorted(tried, key=times.__getitem__)[:5]
                print(f"{model} {n} x {k}, {tokens} tokens: {times[own]:.1f} {own}")
                print("".join(f"  {times[tile]:6.1f} {tile}\n" for tile in best), end="")


if __name__ == "__main__":
    main()
