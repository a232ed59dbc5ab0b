"""Runs the checks of one kind of kernel alone, as the ``check_*.py`` beside it do."""

import argparse
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch


def main(checks: Callable[[int, bool], Iterator[tuple[str, str | None]]]) -> None:
    """Run ``checks(fuzz, small)``, print those that fail, and exit with 1 if any did."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fuzz", type=int, default=500, help="random shapes")
    parser.add_argument("--small", action="store_true", help="few launches, for compute-sanitizer")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit(f"{Path(sys.argv[0]).name}: a CUDA device is needed")
    torch.manual_seed(0)
    random.seed(0)
    total = failures = 0
    for name, wrong in checks(0 if args.small else args.fuzz, args.small):
        total, failures = total + 1, failures + (wrong is not None)
        if wrong:
            print(f"FAIL {name}: {wrong}", flush=True)
    print(
        f"{total} checks, {failures} failures; {torch.cuda.get_device_name()}, torch "
        f"{torch.__version__}"
    )
    sys.exit(min(failures, 1))
