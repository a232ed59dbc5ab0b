"""Seconds to pack and unpack one weight in every layout, and their ratio to a plain copy of its
codes.

    python benchmarks/layouts/pack.py [--shape 4096 14336] [--device cuda] [--repeat 5]

On the CPU one thread is used. The time is the best of the repeats. The peak memory, relative to the
bytes of the codes, is measured on CUDA only, where torch counts it.
"""

import argparse
import time
from collections.abc import Callable

import torch

from qtool.layouts import LAYOUTS


def seconds(action: Callable[[], object], device: str, repeat: int) -> float:
    """The best time of ``repeat`` runs after a warm-up."""
    action()
    best = float("inf")
    for _ in range(repeat):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def peak(action: Callable[[], object]) -> int:
    """Peak of the bytes that ``action`` allocates on CUDA."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    action()
    return torch.cuda.max_memory_allocated() - before


def sparse_codes(n: int, k: int, device: str) -> torch.Tensor:
    """Unsigned codes that are 8 (zero) in two of every four inputs, so that every layout takes
    them.
    """
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=device)
    codes.view(n, k // 4, 4)[..., ::2] = 8
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 14336), metavar=("N", "K"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)

    n, k = args.shape
    codes = sparse_codes(n, k, args.device)
    copy = seconds(codes.clone, args.device, args.repeat)
    print(f"{n} x {k} on {args.device}; a plain copy of the codes: {copy:.5f} s")
    print(
        f"{'layout':18} {'pack s':>9} {'x copy':>7} {'unpack s':>9} {'x copy':>7} "
        f"{'signed s':>9} {'peak':>11}"
    )
    for layout in LAYOUTS.values():
        packed = layout.pack(codes)
        actions = (
            lambda layout=layout: layout.pack(codes),
            lambda layout=layout, packed=packed: layout.unpack(packed, n, k, signed=False),
            lambda layout=layout, packed=packed: layout.unpack(packed, n, k, signed=True),
        )
        pack, unpack, signed = (seconds(action, args.device, args.repeat) for action in actions)
        taken = (
            "/".join(f"{peak(a) / codes.nbytes:.2f}" for a in actions[:2])
            if args.device == "cuda"
            else "-"
        )
        print(
            f"{layout.name:18} {pack:9.5f} {pack / copy:7.1f} {unpack:9.5f} {unpack / copy:7.1f}"
            f" {signed:9.5f} {taken:>11}"
        )


if __name__ == "__main__":
    main()
