"""What the checks of all kernels share: running those of one kind alone, and comparing outputs."""

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

#: bits of a significand, the first one included
ULP_BITS = {torch.bfloat16: 8, torch.float16: 11, torch.float32: 24}


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


def ulp(want: Tensor, dtype: torch.dtype) -> Tensor:
    """A unit in the last place of ``dtype`` at each value of ``want``, which is float64."""
    size = want.abs().clamp_min(torch.finfo(dtype).tiny)
    return torch.exp2(torch.floor(torch.log2(size)) + 1 - ULP_BITS[dtype])


def where(wrong: Tensor, got: Tensor) -> str | None:
    """The number of ``wrong`` elements, the first place and some values; None if none is."""
    if not wrong.any():
        return None
    first, values = wrong.nonzero()[0].tolist(), got[wrong][:3].tolist()
    return f"{int(wrong.sum())} of {wrong.numel()} wrong, first at {first}, got {values}"


def unlike_the_cpu(
    got: Sequence[Tensor], want: Sequence[Tensor], dtype: torch.dtype, fused: bool, ulps: int
) -> str | None:
    """How quantized activations differ from the CPU's, both ``(codes, scale, ...)``; None if not.

    They are equal; if another operation is fused with the quantization, scales differ by at most
    ``ulps`` of the input's ``dtype`` and codes by one, or by two for inputs of 16 bits.
    """
    codes, scale = (t.cpu() for t in got[:2])
    if not fused:
        same = torch.equal(codes, want[0]) and torch.equal(scale, want[1])
        return None if same else "differs from the CPU"
    if not torch.allclose(scale, want[1], rtol=ulps * torch.finfo(dtype).eps):
        return f"scale off by {(scale / want[1] - 1).abs().max():.1e}"
    most = (codes.int() - want[0].int()).abs().max()
    return None if most <= 1 + (dtype != torch.float32) else "codes differ"


def captured(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """A CUDA graph of ``call``, and the output that each replay computes again.

    ``call`` runs once before, since what it does only once cannot be captured.
    """
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out
