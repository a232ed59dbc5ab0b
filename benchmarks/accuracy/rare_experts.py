"""Measures how added tokens help experts of a mixture that are hardly ever chosen.

    python benchmarks/accuracy/rare_experts.py MODEL TEXT HELDOUT [--least 0,16,64,256] [--json OUT]

MODEL is quantized by GPTQ, on windows of TEXT, once for each ``min_expert_tokens``. On HELDOUT each
expert's output error is measured on the tokens that the float model routes to it, and averaged over
experts by the number of calibration tokens that were routed to them. The perplexity is printed too.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from qtool import recipes
from qtool.calibration.expert_tokens import NOTE
from qtool.io.source import Checkpoint
from qtool.models.experts import SeparateExperts, separate_experts
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.huggingface import dequantized

#: ranges of routed calibration tokens: from, and below
RANGES = ((0, 1), (1, 16), (16, 64), (64, 256), (256, 1 << 30))


def recipe_of(scheme: str, least: int) -> recipes.Recipe:
    """Plain GPTQ, which leaves the experts' inputs as they are."""
    rule = {"match": ".*", "scheme": scheme, "group_size": 64}
    made = {"layers": [rule], "min_expert_tokens": least, "rounding": "gptq"}
    return recipes.parse(made, f"rare experts, {least}")


def stacks(model: PreTrainedModel) -> dict[str, SeparateExperts]:
    """All experts of each block, by name."""
    return {n: m for n, m in model.named_modules() if isinstance(m, SeparateExperts)}


@torch.no_grad()
def inputs(model: PreTrainedModel, windows: Tensor) -> dict[str, list[Tensor]]:
    """The inputs of each expert ``[tokens, H]`` in ``model``, by stack."""
    seen: dict[str, list[tuple[Tensor, Sequence[int]]]] = {}

    def note(of: list[tuple[Tensor, Sequence[int]]], x: Tensor, counts: Sequence[int]) -> None:
        of.append((x, counts))

    for name, experts in stacks(model).items():
        first = next(iter(experts.roles.values()))
        experts.observers[first] = partial(note, seen.setdefault(name, []))
    for window in windows.split(8):
        model(window)
    for experts in stacks(model).values():
        experts.observers.clear()
    return {
        name: [
            torch.cat(parts) for parts in zip(*(x.split(list(n)) for x, n in found), strict=True)
        ]
        for name, found in seen.items()
    }


@torch.no_grad()
def perplexity(model: PreTrainedModel, windows: Tensor) -> float:
    """The perplexity of all ``windows [B, S]``, eight at a time."""
    losses = [model(w, labels=w).loss for w in windows.split(8)]
    return math.exp(float(torch.stack(losses).mean()))


@torch.no_grad()
def errors(
    exact: PreTrainedModel, rounded: PreTrainedModel, seen: dict[str, list[Tensor]]
) -> dict[str, float]:
    """The relative output error of each expert that held-out tokens are routed to."""
    found, others = {}, stacks(rounded)
    for name, experts in stacks(exact).items():
        for number, x in enumerate(seen[name]):
            if len(x):
                wanted = experts.of_some(x, [len(x)], number)
                missed = others[name].of_some(x, [len(x)], number) - wanted
                found[f"{name}.{number}"] = float(missed.norm() / wanted.norm())
    return found


def random_windows(text: Path, tokenizer: Any, count: int, length: int, seed: int) -> Tensor:
    """Windows ``[count, length]`` from random places of the first two million characters."""
    ids = torch.tensor(tokenizer(text.read_text()[:2_000_000]).input_ids)
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(ids) - length, (count,), generator=random)
    return torch.stack([ids[start : start + length] for start in starts])


def quantized(
    model: Path, recipe: recipes.Recipe, calibration: Calibration
) -> tuple[PreTrainedModel, int]:
    """``model`` quantized and dequantized again, and the number of tokens added to its experts."""
    with tempfile.TemporaryDirectory() as work:
        out = quantize(Checkpoint(model), recipe, Path(work) / "out", calibration=calibration)
        blocks = json.loads((out / "qtool.json").read_text())["blocks"]
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    added = sum(note["added"] for block in blocks for note in block.get(NOTE, {}).values())
    return dequantized(loaded), added


def routed_tokens(model: PreTrainedModel, windows: Tensor) -> dict[str, int]:
    """The tokens of ``windows`` that ``model`` routes to each expert."""
    found = inputs(model, windows)
    return {f"{name}.{e}": len(x) for name, each in found.items() for e, x in enumerate(each)}


def by_range(error_of: dict[str, float], routed: dict[str, int]) -> dict[str, dict[str, Any]]:
    """The number of experts and their mean error for each of :data:`RANGES`."""
    found = {}
    for low, high in RANGES:
        some = [error for name, error in error_of.items() if low <= routed[name] < high]
        key = f"{low} to {high - 1}" if high < 1 << 30 else f"{low} or more"
        found[key] = {"experts": len(some), "error": sum(some) / max(1, len(some))}
    return found


def main() -> None:
    """Print the errors of experts by number of routed tokens, for each seed and least tokens."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("heldout", type=Path)
    parser.add_argument("--least", default="0,16,64,256,1024")
    parser.add_argument("--scheme", default="w4a8-lqq")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(chosen.model)
    exact = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32).eval()
    separate_experts(exact)
    heldout = random_windows(chosen.heldout, tokenizer, 128, chosen.seqlen, 1000)
    seen = inputs(exact, heldout)
    results: dict[str, Any] = {"float perplexity": perplexity(exact, heldout), "rows": []}
    for seed in range(chosen.seeds):
        windows = random_windows(chosen.text, tokenizer, chosen.samples, chosen.seqlen, seed)
        routed = routed_tokens(exact, windows)
        calibration = Calibration(list(windows.split(8)), {"seed": seed})
        for least in map(int, chosen.least.split(",")):
            recipe = recipe_of(chosen.scheme, least)
            rounded, added = quantized(chosen.model, recipe, calibration)
            ranges = by_range(errors(exact, rounded, seen), routed)
            found = {"perplexity": perplexity(rounded, heldout), "added": added}
            results["rows"].append({"seed": seed, "min_expert_tokens": least, **ranges, **found})
            cells = [f"{v['experts']}: {v['error']:.4f}" for v in ranges.values()]
            print(seed, least, *cells, f"{found['perplexity']:.3f}", added, flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
