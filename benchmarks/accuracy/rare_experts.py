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

    def windows(path: Path, count: int, seed: int) -> Tensor:
        ids = torch.tensor(tokenizer(path.read_text()[:2_000_000]).input_ids)
        random = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(ids) - chosen.seqlen, (count,), generator=random)
        return torch.stack([ids[start : start + chosen.seqlen] for start in starts])

    exact = AutoModelForCausalLM.from_pretrained(chosen.model, dtype=torch.float32).eval()
    separate_experts(exact)
    heldout = windows(chosen.heldout, 128, 1000)
    seen = inputs(exact, heldout)
    results: dict[str, Any] = {"float perplexity": perplexity(exact, heldout), "rows": []}
    for seed in range(chosen.seeds):
        text = list(windows(chosen.text, chosen.samples, seed).split(8))
        for least in map(int, chosen.least.split(",")):
            with tempfile.TemporaryDirectory() as work:
                out = quantize(
                    Checkpoint(chosen.model),
                    recipe_of(chosen.scheme, least),
                    Path(work) / "out",
                    calibration=Calibration(text, {"seed": seed}),
                )
                notes = json.loads((out / "qtool.json").read_text())["blocks"]
                rounded = dequantized(
                    AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
                )
            if least == 0:
                routed = routed_tokens(exact, text)
            of = errors(exact, rounded, seen)
            row: dict[str, Any] = {"seed": seed, "min_expert_tokens": least}
            for low, high in RANGES:
                some = [error for name, error in of.items() if low <= routed[name] < high]
                key = f"{low} to {high - 1}" if high < 1 << 30 else f"{low} or more"
                row[key] = {"experts": len(some), "error": sum(some) / max(1, len(some))}
            row["perplexity"] = perplexity(rounded, heldout)
            row["added"] = sum(n["added"] for b in notes for n in b.get(NOTE, {}).values())
            results["rows"].append(row)
            cells = [f"{v['experts']}: {v['error']:.4f}" for v in row.values() if type(v) is dict]
            print(seed, least, *cells, f"{row['perplexity']:.3f}", row["added"], flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps(results, indent=1) + "\n")


def routed_tokens(model: PreTrainedModel, text: list[Tensor]) -> dict[str, int]:
    """The calibration tokens that the float model routes to each expert."""
    found = inputs(model, torch.cat(text))
    return {f"{name}.{e}": len(x) for name, each in found.items() for e, x in enumerate(each)}


if __name__ == "__main__":
    main()
