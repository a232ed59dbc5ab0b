"""Every scheme and recipe on a model that comes without text: it writes its own.

    python benchmarks/accuracy/sampled.py MODEL [--schemes all] [--recipes fast,paper,best] [--kv kv4]

Windows are sampled from the model at temperature 1, token by token, and kept as tokens: 64 to calibrate on, 96 others
to evaluate on. The rise of log-perplexity on them estimates the divergence, which is computed too (docs/accuracy.md).
"""

import argparse
import math
import tempfile
from pathlib import Path

import torch
from schemes import ORDER, divergence
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qtool.checkpoint.source import Checkpoint
from qtool.pipeline.commands import Wishes
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.load import load

RECIPES = ("fast", "paper", "best")


@torch.no_grad()
def sample(model: PreTrainedModel, windows: int, length: int, seed: int) -> Tensor:
    """``[windows, length]`` tokens that the model draws, each window from its first token."""
    random, cache = torch.Generator().manual_seed(seed), DynamicCache()
    tokens = [torch.full((windows, 1), model.config.bos_token_id or 0)]
    while len(tokens) < length:
        logits = model(tokens[-1], past_key_values=cache, use_cache=True).logits[:, -1].float()
        tokens.append(torch.multinomial(logits.softmax(-1), 1, generator=random))
    return torch.cat(tokens, 1)


@torch.no_grad()
def log_perplexity(model: PreTrainedModel, windows: Tensor) -> float:
    """Mean negative log-likelihood of a token."""
    logs = [model(ids, use_cache=False).logits.float().log_softmax(-1)[:, :-1] for ids in windows.split(4)]
    return -float(torch.cat(logs).gather(-1, windows[:, 1:, None]).double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--schemes", default="all", help="all, or names with commas")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--kv", help="a KV-cache quantizer for every row")
    arguments = parser.parse_args()
    base = load(arguments.model, dtype=torch.float32)
    calibration, windows = sample(base, 64, 512, seed=0), sample(base, 96, 512, seed=1)
    full = log_perplexity(base, windows)
    print(f"full precision: perplexity {math.exp(full):.3f}\n")
    print("| scheme | recipe | rise | KL, nats |\n|---|---|---:|---:|")
    for scheme in ORDER if arguments.schemes == "all" else arguments.schemes.split(","):
        for recipe in arguments.recipes.split(","):
            with tempfile.TemporaryDirectory() as directory:
                chosen = Wishes(recipe=recipe, kv=arguments.kv).of(scheme)
                out, batches = Path(directory, "model"), Calibration(list(calibration.split(4)))
                quantize(Checkpoint(arguments.model), chosen, out, calibration=batches)
                model = load(out)
                rise, kl = math.exp(log_perplexity(model, windows) - full) - 1, divergence(model, base, windows)
            print(f"| {scheme} | {recipe} | {rise:+.2%} | {kl:.4f} |", flush=True)


if __name__ == "__main__":
    main()
