"""Quantizes random models with random options, and checks what holds for all of them.

Each combination is drawn from its number: a tiny random model of one of transformers' classes, a
scheme, a recipe and options. Sizes that transformers does not take, and what the plan refuses in a
sentence, are passed over::

    python -m tests.combinations 0 100                  # those from 0 to 99
    python -m tests.combinations 0 100 --device cuda

A line says what became of each, and ``WRONG`` what does not hold. The exit code is 0 where all
holds, else 1. What is checked: the plan's bytes, ``verify``, finite logits that diverge little with
8-bit weights, and a second run to the byte.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import qtool
from qtool.errors import QtoolError
from tests.models.tiny import save_tiny

KINDS = (
    *("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2"),
    *("mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "glm4_moe", "falcon", "gpt_neox", "bloom"),
    *("stablelm", "granite", "cohere2", "starcoder2", "gpt2", "qwen3_5_text", "lfm2", "falcon_h1"),
)
SCHEMES = (
    *("w8a8", "w4a16", "w4a8-lqq", "w4a8-qoq-g128", "w4a8-qoq", "w4ax-fmpq"),
    *("w4a4-g128", "w4a4-mix", "w4a16-24"),
)
LAYOUTS = "row-major", "dual-mma", "compute-aware", "marlin"
#: most divergence of 8-bit weights and activations, in nats a token
MOST_W8A8 = 0.1


class Combination(NamedTuple):
    """A model's class and sizes, a scheme, and options of ``qtool.quantize``."""

    kind: str
    sizes: dict[str, Any]
    scheme: str
    options: dict[str, Any]
    windows: Tensor


def drawn(number: int) -> Combination:
    """The combination of this number."""
    random = Random(number)

    def rarely(share: float, values: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
        return {k: random.choice(of) for k, of in values.items() if random.random() < share}

    sizes = rarely(
        0.4,
        {
            "hidden_size": (64, 128, 192, 256),
            "intermediate_size": (96, 160, 256, 384, 512),
            "num_hidden_layers": (1, 3),
            "num_key_value_heads": (1, 4),
            "head_dim": (16, 64),
            "tie_word_embeddings": (False, True),
            "attention_bias": (True,),
        },
    )
    options = {"recipe": random.choice(("fast", "paper", "best"))}
    options |= rarely(
        0.2,
        {
            "layout": LAYOUTS,
            "target": ("a100", "l40s", "h200"),
            "kv": ("kv8", "kv4", "kv4-channel"),
            "group_size": ("32", "64", "128", "channel"),
            "dtype": ("bfloat16", "float16", "float32"),
            "windows": ("given", "continued"),
            "for_export": (True,),
        },
    )
    count, length = random.choice((1, 2, 5)), random.choice((16, 33, 64))
    ids = torch.randint(3, 300, (count, length), generator=torch.Generator().manual_seed(number))
    return Combination(random.choice(KINDS), sizes, random.choice(SCHEMES), options, ids)


def checked(found: Combination, directory: Path, device: str) -> Iterator[str]:
    """What became of ``found``; a text that begins with ``WRONG`` for each thing that is wrong."""
    try:
        model = save_tiny(found.kind, directory / "model", **found.sizes)
    except Exception as error:  # transformers' checks raise exceptions of several types
        yield f"no model: {str(error).splitlines()[-1]}"
        return
    count, length = found.windows.shape
    options: dict[str, Any] = found.options | {"calibration": found.windows, "device": device}
    options |= {"samples": count, "seqlen": length}
    try:
        planned = qtool.plan(model, found.scheme, **options)
    except QtoolError as error:
        yield f"refused: {error}"
        return
    one = qtool.quantize(model, found.scheme, out=directory / "one", **options).directory
    two = qtool.quantize(model, found.scheme, out=directory / "two", **options).directory
    shards = sorted(path.name for path in one.glob("*.safetensors"))
    if any((one / name).read_bytes() != (two / name).read_bytes() for name in shards):
        yield "WRONG: a second run wrote other bytes"
    headers = sum(8 + int.from_bytes((one / n).read_bytes()[:8], "little") for n in shards)
    size = sum((one / name).stat().st_size for name in shards) - headers
    if size != sum(planned.shard_bytes):
        yield f"WRONG: {size} bytes of tensors, {sum(planned.shard_bytes)} planned"
    problems = [f"{row.name}: {row.problem}" for row in qtool.verify(one) if row.problem]
    yield from (f"WRONG: {problem}" for problem in problems)
    exact, made = logits(model, device), logits(one, device)
    divergence = float((exact.exp() * (exact - made)).sum(-1).mean())
    if not divergence < (MOST_W8A8 if found.scheme == "w8a8" else float("inf")):
        yield f"WRONG: the logits diverge by {divergence:.4f} nats"
    yield f"right, {divergence:.4f} nats from the model"


def logits(model: Path, device: str) -> Tensor:
    """Log-probabilities ``[2, 24, V]`` that the model gives for the same random tokens."""
    ids = torch.randint(3, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    loaded = qtool.load(model, device=device, dtype=None if device != "cpu" else torch.float32)
    with torch.no_grad():
        return loaded(ids.to(device), use_cache=False).logits.float().log_softmax(-1).cpu()


def main() -> int:
    """Print what became of each combination; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=int, help="the first number")
    parser.add_argument("stop", type=int, help="the number after the last one")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    wrong = False
    for number in range(arguments.first, arguments.stop):
        found = drawn(number)
        shape = "x".join(map(str, found.windows.shape))
        print(f"{number}: {found.kind} {found.sizes} {found.scheme} {found.options} {shape}")
        with tempfile.TemporaryDirectory() as directory:
            for line in checked(found, Path(directory), arguments.device):
                print(f"  {line}", flush=True)
                wrong |= line.startswith("WRONG")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
