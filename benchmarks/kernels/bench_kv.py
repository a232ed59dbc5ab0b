"""Time decode attention over a packed cache beside torch's SDPA on a 16-bit one, on this GPU.

    python benchmarks/kernels/bench_kv.py [--shapes 64x4096x8x32x128,1x32768x8x32x128]
    [--json benchmarks/results/kv.json]

A shape is B x T x Hkv x Hq x D.
"""

import argparse
import sys
from pathlib import Path

import torch

from qtool.bench.kv import HEAD, SHAPES, kv_rows
from qtool.bench.stored import machine, store
from qtool.table import markdown


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--json", type=Path, help="keep the table here")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kv.py: a CUDA device is needed")
    rows = kv_rows(arguments.shapes.split(","))
    print(markdown(HEAD, rows))
    print(machine("cuda"))
    if arguments.json:
        store(arguments.json, {"head": HEAD, "rows": rows}, device="cuda")


if __name__ == "__main__":
    main()
