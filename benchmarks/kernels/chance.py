"""How far chance moves a quantized model's perplexity: one checkpoint, its linears' sums off by a
last place, on a CPU.

    python benchmarks/kernels/chance.py DIR [--text demo] [--draws 2] [--dtype float32]
    [--limit 16]

The float32 output of every linear with quantized activations is multiplied by 1 + u, u uniform
within 2^-23, before it is rounded to the model's dtype. Another order of sums has the same effect,
on any device. It prints each draw's perplexity, and for all but the first (no noise) the relative
change and the standard error of the paired difference over windows.
"""

import argparse
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from qtool.data import corpora
from qtool.eval.perplexity import perplexity
from qtool.runtime.linear import QuantLinear
from qtool.runtime.load import load, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--text", default="demo", help="as of qtool eval")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--limit", type=int, help="windows evaluated; all by default")
    parser.add_argument("--dtype", default="bfloat16", help="of what is not quantized")
    args = parser.parse_args()
    text = corpora.load(args.text, split=corpora.TEST).text
    model = load(args.directory, dtype=getattr(torch, args.dtype))
    tokenizer = load_tokenizer(args.directory)
    exact = QuantLinear.reference

    def noisy(linear: QuantLinear, x: Tensor) -> Tensor:
        y = exact(linear, x)
        return y * (1 + (torch.rand_like(y) - 0.5) * 2**-22)

    first = torch.empty(0)
    for draw in range(args.draws + 1):
        torch.manual_seed(draw)
        with mock.patch.object(QuantLinear, "reference", noisy if draw else exact):
            found = perplexity(text, model, tokenizer, batch_size=8, limit=args.limit)
        windows = torch.tensor(found.window_nll, dtype=torch.float64)
        first = windows if draw == 0 else first
        difference = windows - first
        change = float(difference.mean().expm1())
        chance = float(difference.std() / len(windows) ** 0.5)
        print(f"{args.directory.name} {args.dtype} draw {draw}: {found.perplexity:.5f}", end=" ")
        print(
            f"({change:+.1e}, by chance {chance:.1e})" if draw else f"({found.tokens} tokens)",
            flush=True,
        )


if __name__ == "__main__":
    main()
