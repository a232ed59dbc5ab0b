"""Time decode attention over a packed cache beside torch's SDPA on a 16-bit one, on this GPU.

    python benchmarks/kernels/bench_kv.py [--shapes 64x4096x8x32x128,1x32768x8x32x128]

A shape is B x T x Hkv x Hq x D.
"""

import argparse

import torch

from qtool.bench.kv import SHAPES, kv_table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shapes", default=",".join(SHAPES))
    print(kv_table(parser.parse_args().shapes.split(",")))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
