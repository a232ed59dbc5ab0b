"""GPTQ for experts of one shape, one by one and several together: time, peak memory, and a hash of
codes and scales.

    python benchmarks/quantize/experts.py [--shape 32x96x256] [--schemes w4a8-lqq] [--together 1,32]
    [--device cuda]

The experts have random weights ``[N, K]`` and Hessians of correlated inputs. The hash must be the
same in every row of a shape.
"""

import argparse
import hashlib
import time

import torch

from qtool.calibration.rounding.gptq.gptq import GptqOptions, Problem, Solution, solve
from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.schemes import get


def experts(count: int, n: int, k: int, scheme: str, device: torch.device) -> list[Problem]:
    """Random problems of one shape."""
    random = torch.Generator(device=device).manual_seed(0)
    mixing = torch.eye(k, device=device) + 0.02 * torch.randn(k, k, generator=random, device=device)
    found = []
    for _ in range(count):
        size = torch.rand(k, generator=random, device=device)
        hessian = Hessian(k, device)
        hessian.add(
            (torch.randn(2048, k, generator=random, device=device) @ mixing * size).bfloat16()
        )
        weight = 0.02 * torch.randn(n, k, generator=random, device=device)
        found.append(Problem(get(scheme), weight, hessian.complete()))
    return found


def digest(solutions: list[Solution]) -> str:
    """A hash of all codes and parameters."""
    found = hashlib.sha256()
    for solution in solutions:
        for tensor in (solution.codes, *solution.params.values()):
            found.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()[:12]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="32x96x256", help="experts x N x K, several with commas")
    parser.add_argument("--schemes", default="w4a8-lqq")
    parser.add_argument("--together", default="1,4,16,32")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device, options = torch.device(arguments.device), GptqOptions()
    cuda = device.type == "cuda"
    for shape in arguments.shape.split(","):
        for scheme in arguments.schemes.split(","):
            problems = experts(*map(int, shape.split("x")), scheme, device)  # type: ignore[misc, arg-type]
            for size in map(int, arguments.together.split(",")):
                seconds = []
                for _ in range(2):
                    if cuda:
                        torch.cuda.reset_peak_memory_stats()
                        torch.cuda.synchronize()
                    started, found = time.perf_counter(), []
                    for start in range(0, len(problems), size):
                        found += solve(problems[start : start + size], options)
                    if cuda:
                        torch.cuda.synchronize()
                    seconds.append(time.perf_counter() - started)
                peak = f", {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if cuda else ""
                line = (
                    f"{shape} {scheme}, {size} together: {min(seconds):.2f} s{peak}, "
                    f"{digest(found)}"
                )
                print(line, flush=True)


if __name__ == "__main__":
    main()
