"""Measures the time that the fusion of norms and SiLU with quantization saves.

    python benchmarks/serving/fusion.py kernels                    # each pair, fused and not
    python benchmarks/serving/fusion.py steps DIR [--unfused]      # decode steps in vLLM

Run ``steps`` once with the fusion pass, which vLLM has by default, and once without.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from qtool.bench.cuda_graphs import graph_us
from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.activation.quantize_residual_norm import quantize_residual_norm
from qtool.serving.bench import LONG, SHORT, timed
from qtool.table import render

EPSILON = 1e-5
INPUT_TOKENS = 1024


def residual_norm(x: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's own norm, which it compiles."""
    wide = x.float() + residual.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return (wide * inverse).to(norm.dtype) * norm, wide.to(x.dtype)


def silu_up(x: Tensor) -> Tensor:
    """``silu(gate) * up`` of both in one tensor, which vLLM compiles."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def pairs(m: int, k: int) -> Iterator[tuple[str, Callable[[], object], Callable[[], object]]]:
    """The name, the unfused and the fused call of each pair."""
    x, residual = torch.randn(2, m, k, device="cuda", dtype=torch.bfloat16)
    wide = torch.randn(m, 2 * k, device="cuda", dtype=torch.bfloat16)
    norm = torch.rand(k, device="cuda", dtype=torch.bfloat16)
    normed, activated = (torch.compile(f, dynamic=True) for f in (residual_norm, silu_up))

    def plain(y: Tensor) -> object:
        return quantize_activation(y, None, None, "none", 0.0)

    yield (
        "residual + norm",
        lambda: plain(normed(x, residual, norm)[0]),
        lambda: quantize_residual_norm(x, residual, None, norm, EPSILON),
    )
    yield (
        "silu * up",
        lambda: plain(activated(wide)),
        lambda: quantize_activation(wide, None, None, "silu-up", 0.0),
    )


def kernels() -> None:
    """Time each pair at the widths of an 8B model."""
    rows = []
    for k in (4096, 14336):
        for m in (1, 16, 64, 256, 4096):
            for name, unfused, fused in pairs(m, k):
                times = (graph_us([call] * 20, replays=50) for call in (unfused, fused))
                rows.append((name, str(k), str(m), *(f"{us:.2f}" for us in times)))
    print(render(("pair", "K", "M", "unfused us", "fused us"), rows))


def steps(directory: Path, batches: list[int], *, unfused: bool) -> None:
    """Milliseconds of a decode step at each batch size."""
    from qtool.serving.vllm import fusion
    from qtool.serving.vllm.engine import engine

    counts: Counter[str] = Counter()
    fuse = fusion.fuse

    def counted(graph: torch.fx.Graph) -> int:
        counts["graphs"] += 1
        counts["fused"] += (found := fuse(graph))
        return found

    fusion.fuse = counted
    if unfused:
        fusion.switch_on = lambda config: None
    llm = engine(
        directory,
        kv_cache_dtype="fp8",
        max_model_len=INPUT_TOKENS + LONG + 1,
        max_num_batched_tokens=8192,
        max_num_seqs=max(batches),
    )
    seconds = timed(llm, INPUT_TOKENS)
    how = "unfused" if unfused else "fused"
    for batch in batches:
        seconds(batch, 4)
        short, long = (min(seconds(batch, tokens) for _ in range(3)) for tokens in (SHORT, LONG))
        print(how, batch, f"{1000 * (long - short) / (LONG - SHORT):.3f} ms a step", flush=True)
    print("RESULT", how, dict(counts))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kernels", "steps"))
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--unfused", action="store_true")
    parser.add_argument("--batches", default="1,16,64")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("fusion.py: a CUDA device is needed")
    if options.what == "kernels":
        kernels()
    else:
        batches = [int(batch) for batch in options.batches.split(",")]
        steps(options.directory, batches, unfused=options.unfused)
