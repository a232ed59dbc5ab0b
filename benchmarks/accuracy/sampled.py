"""Every scheme and recipe on a model without a text: the model samples its own.

    python benchmarks/accuracy/sampled.py MODEL [--schemes all] [--recipes fast,paper,best] [--kv
    none,kv4]

Windows are sampled from the model at temperature 1, token by token, and kept as tokens: 64 for
calibration and 96 others for evaluation. The rise of log-perplexity on the latter estimates the
divergence, which is computed too (benchmarks/journal/accuracy.md). With several caches, the rows of
all but the first show the difference from the first. Errors are standard errors, paired by window.
"""

import argparse
import itertools
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from schemes import divergence, named_schemes, rise_and_error, rise_text
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qtool.io.model_directory import directory_of
from qtool.io.source import Checkpoint
from qtool.models.cache_argument import CACHE
from qtool.pipeline.options import RecipeOverrides
from qtool.pipeline.quantize import Calibration, quantize
from qtool.recipes import VARIANTS, Recipe
from qtool.runtime.load import load


@torch.no_grad()
def sample(
    model: PreTrainedModel, windows: int, length: int, seed: int, first: int | None = None
) -> Tensor:
    """``[windows, length]`` tokens that the model draws, each window from its first token.

    ``first`` is a token that begins every window and occurs nowhere else.
    """
    random, cache = torch.Generator(model.device).manual_seed(seed), DynamicCache()
    start = (model.config.bos_token_id or 0) if first is None else first
    tokens = [torch.full((windows, 1), start, device=model.device)]
    while len(tokens) < length:
        logits = model(tokens[-1], **{CACHE: cache}, use_cache=True).logits[:, -1].float()
        if first is not None:
            logits[:, first] = -torch.inf
        tokens.append(torch.multinomial(logits.softmax(-1), 1, generator=random))
    return torch.cat(tokens, 1)


@torch.no_grad()
def measured(model: PreTrainedModel, windows: Tensor) -> dict[str, Any]:
    """Perplexity, and the mean negative log-likelihood of a token by window."""
    nll: list[float] = []
    for ids in windows.split(4):
        logs = model(ids, use_cache=False).logits.float().log_softmax(-1)[:, :-1]
        nll += (-logs.gather(-1, ids[:, 1:, None])[..., 0].double().mean(1)).tolist()
    return {"perplexity": math.exp(sum(nll) / len(nll)), "window_nll": nll}


def quantized(source: Path, recipe: Recipe, calibration: Tensor, device: str) -> PreTrainedModel:
    """The model of ``source`` quantized by ``recipe``, on ``device``."""
    batches = Calibration(list(calibration.cpu().split(4)))
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "model")
        quantize(Checkpoint(source), recipe, out, calibration=batches, device=device)
        return load(out, dtype=torch.float32, device=device)


def main() -> None:
    """Print a row for each scheme, recipe and cache, on windows sampled from the model itself."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="a directory, or demo")
    parser.add_argument("--schemes", default="all", help="all, or names with commas")
    parser.add_argument("--recipes", default=",".join(VARIANTS))
    parser.add_argument(
        "--kv", default="none", help="KV-cache quantizers with commas, each for every row"
    )
    parser.add_argument("--windows", type=int, default=96, help="evaluated")
    parser.add_argument("--calibration", type=int, default=64, help="windows calibrated on")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    source = directory_of(arguments.model)
    base = load(source, dtype=torch.float32, device=arguments.device)
    calibration = sample(base, arguments.calibration, arguments.length, seed=0)
    windows = sample(base, arguments.windows, arguments.length, seed=1)
    full = measured(base, windows)
    print(f"full precision: perplexity {full['perplexity']:.3f}\n")
    print(
        "| scheme | recipe | cache | rise | KL, nats | the cache adds "
        "|\n|---|---|---|---:|---:|---:|"
    )
    for scheme, recipe in itertools.product(
        named_schemes(arguments.schemes), arguments.recipes.split(",")
    ):
        first = None
        for kv in arguments.kv.split(","):
            chosen = RecipeOverrides(kv=None if kv == "none" else kv).recipe(scheme, recipe)
            model = quantized(source, chosen, calibration, arguments.device)
            found, kl = measured(model, windows), divergence(model, base, windows)
            rise = rise_text(*rise_and_error(found, full))
            adds = "-" if first is None else rise_text(*rise_and_error(found, first))
            print(f"| {scheme} | {recipe} | {kv} | {rise} | {kl:.4f} | {adds} |", flush=True)
            first = first or found


if __name__ == "__main__":
    main()
