"""Time the GEMMs of three models' layers against their floor and torch's own matmuls, on this GPU.

    python benchmarks/kernels/bench.py [--models llama-3-8b,llama-2-70b] [--tokens 1,16,64]
    [--columns w4a4,w8a8] [--json benchmarks/results/kernels.json]

Results of other kernels than the W4A8 ones are kept in benchmarks/results/kernels-others.json.
"""

import argparse
import sys
from pathlib import Path

import torch

from qtool.bench.gemm import MODELS, TOKENS, gemm_rows, table
from qtool.bench.gemm_columns import COLUMNS, DEFAULT_COLUMNS
from qtool.bench.stored import machine, store
from qtool.kernels.build import compile_all, toolchain


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument(
        "--columns", default=",".join(DEFAULT_COLUMNS), help=f"of {', '.join(COLUMNS)}"
    )
    parser.add_argument("--json", type=Path, help="keep the sums here")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench.py: a CUDA device is needed")
    names = args.columns.split(",")
    models = args.models.split(",")
    sizes = [int(m) for m in args.tokens.split(",")]
    shapes = [shape for model in models for shape in MODELS[model].values()]
    chosen = ((COLUMNS[name], m, *shape) for name in names for m in sizes for shape in shapes)
    compile_all((column.source(m, n, k) for column, m, n, k in chosen), "sm_90a")
    rows = gemm_rows(models, sizes, names)
    print(table(rows))
    print(f"{machine('cuda')}, NVRTC {toolchain()[2]}")
    if args.json:
        store(args.json, {"rows": rows}, device="cuda")


if __name__ == "__main__":
    main()
