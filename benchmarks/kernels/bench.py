"""Time the GEMMs of three models' layers against their floor and torch's own matmuls, on this GPU.

python benchmarks/kernels/bench.py [--models llama-3-8b,llama-2-70b] [--tokens 1,16,64] [--json FILE]
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

import torch

from qtool.kernels.bench import KERNELS, MODELS, TOKENS, gemm_table, markdown, operand_of
from qtool.kernels.build import cubin, toolchain
from qtool.kernels.gemm import Operand, definition
from qtool.kernels.tiles import TABLE, Tile


def compile_one(job: tuple[Operand, Tile]) -> None:
    """Into the cache, so that the measurement need not wait."""
    cubin(*definition(*job, torch.bfloat16), "sm_90a")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--json")
    args = parser.parse_args()
    operands = [operand_of(*scheme) for scheme in KERNELS.values()]
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_one, [(o, t) for o in operands for t in TABLE]))
    results = gemm_table(args.models.split(","), [int(m) for m in args.tokens.split(",")])
    print(markdown(results))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, NVRTC {toolchain()[2]}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(r) for r in results], file)


if __name__ == "__main__":
    main()
