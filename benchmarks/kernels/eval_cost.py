"""The cost of `qtool eval --deterministic`: a forward in that arithmetic beside the plain one.

    python benchmarks/kernels/eval_cost.py MODEL [--device cuda] [--tokens 2048] [--batch 4] [--runs
    5]

MODEL is a checkpoint with quantized activations. Prints the median seconds of both and their ratio.
"""

import argparse
import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from qtool.eval.deterministic import deterministic_decoder
from qtool.runtime.load import load


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    model: Any = load(args.model, device=args.device)
    ids = torch.randint(3, model.config.vocab_size, (args.batch, args.tokens), device=args.device)
    seconds: dict[str, list[float]] = {"plain": [], "the same everywhere": []}
    for run in range(args.runs + 1):
        for name, context in (
            ("plain", nullcontext()),
            ("the same everywhere", deterministic_decoder(model)),
        ):
            with context:
                start = time.perf_counter()
                float(model(ids, use_cache=False, logits_to_keep=1).logits.sum())  # waits
                seconds[name] += [time.perf_counter() - start] if run else []  # the first compiles
    plain, same = (statistics.median(times) for times in seconds.values())
    memory = f"; {torch.cuda.max_memory_allocated() / 1e9:.1f} GB" if args.device != "cpu" else ""
    print(f"{args.model.name}, {args.batch} x {args.tokens}: {plain:.3f} s plain, ", end="")
    print(f"{same:.3f} s the same everywhere ({same / plain:.2f} times){memory}")


if __name__ == "__main__":
    main()
