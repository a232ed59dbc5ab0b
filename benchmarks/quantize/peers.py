"""llm-compressor's GPTQ beside ours: one machine, one checkpoint, the same tokens and bit width;
time and layer error.

    python benchmarks/quantize/peers.py WORK [--shape llama-3-8b] [--layers 4] [--samples 128]
    [--seqlen 2048] [--json benchmarks/results/quantize-llm-compressor.json]

The script needs llmcompressor and a GPU. Both tools quantize the random checkpoint of ``--shape``
to symmetric 4-bit weights in groups of 128 by GPTQ with damping 0.01, each in a fresh process; its
log stays in WORK. The time runs from opening the model to the stored result; imports are not
counted. The layer error is, for each linear, ||X (W - Q)^T|| / ||X W^T|| with the full-precision
model's inputs X on held-out tokens.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from qtool import recipes
from qtool.bench import quantize as bench
from qtool.bench.random_checkpoint import config_of, make
from qtool.bench.stored import store
from qtool.exchange.import_formats import import_format_of
from qtool.format import native_format
from qtool.io.source import Checkpoint
from qtool.table import render

TOOLS = ("qtool", "llm-compressor")
HELD_OUT = 8
# cpu is for trying the script with --shape llama-tiny, not for measurements
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def main() -> None:
    """Print the time and error of each tool; with ``--tool``, be the process that one runs in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--tool", choices=TOOLS, help="only quantize by this one, in this process")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--json", type=Path, help="keep the table here")
    arguments = parser.parse_args()
    source = arguments.work / f"{arguments.shape}-{arguments.layers}"
    if arguments.tool:
        seconds = {"qtool": ours, "llm-compressor": llm_compressor}[arguments.tool](
            arguments, source
        )
        facts = {"seconds": seconds, "device_bytes": torch.cuda.max_memory_allocated()}
        (arguments.work / f"{arguments.tool}.json").write_text(json.dumps(facts))
        return
    make(config_of(arguments.shape, arguments.layers), source)
    rows = []
    for tool, facts in each_alone(TOOLS, arguments.work):
        errors = layer_errors(source, arguments.work / tool, arguments.seqlen)
        mean, worst = sum(errors.values()) / len(errors), max(errors.values())
        rows.append(
            (
                tool,
                f"{facts['seconds']:.1f}",
                f"{facts['device_bytes'] / 1e9:.1f}",
                f"{mean:.5f}",
                f"{worst:.5f}",
            )
        )
    title = (
        f"{arguments.shape}, {arguments.layers} blocks, W4A16 g128, {arguments.samples} x "
        f"{arguments.seqlen} tokens"
    )
    show(title, ("tool", "s", "device GB", "mean layer error", "largest"), rows, arguments.json)


def show(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], keep: Path | None) -> None:
    """Print a table with its title, and store it in ``keep`` if that is given."""
    print(title)
    print(render(head, rows))
    if keep:
        store(keep, {"title": title, "head": head, "rows": rows}, device=DEVICE)


def each_alone(tools: Iterable[str], work: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The results that each tool stored in ``work`` when this script ran it in its own process.

    A tool that fails is left out, and the end of its output is printed.
    """
    for tool in tools:
        with (work / f"{tool}.log").open("w") as log:
            command = [sys.executable, *sys.argv, "--tool", tool]
            done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            last = Path(log.name).read_text().strip().splitlines()[-1]
            print(f"{tool} failed, see {log.name}: {last}", flush=True)
            continue
        yield tool, json.loads((work / f"{tool}.json").read_text())


def tokens(arguments: argparse.Namespace, source: Path) -> list[Tensor]:
    """The calibration windows ``[1, S]``, the same for both."""
    vocabulary = Checkpoint(source).config["vocab_size"]
    batches = bench.random_tokens(vocabulary, arguments.samples, arguments.seqlen).tokens
    return [row[None] for batch in batches for row in batch]


def ours(arguments: argparse.Namespace, source: Path) -> float:
    """Seconds of qtool's w4a16/paper."""
    recipe = recipes.load("w4a16", "paper")
    measured = bench.run(
        source,
        recipe,
        arguments.work / "qtool",
        samples=arguments.samples,
        seqlen=arguments.seqlen,
        device=DEVICE,
    )
    print(measured.table())
    return float(measured.record["seconds"])


def llm_compressor(arguments: argparse.Namespace, source: Path) -> float:
    """Seconds of llm-compressor's GPTQ, set up as in its examples."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    out = arguments.work / "llm-compressor"
    shutil.rmtree(out, ignore_errors=True)
    batches = [
        {"input_ids": row, "attention_mask": torch.ones_like(row)}
        for row in tokens(arguments, source)
    ]
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    oneshot(
        model=model,
        # required, although the tokens are given as ids
        processor=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel())),
        dataset=torch.utils.data.DataLoader(batches, batch_size=None),
        recipe=[GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])],
        num_calibration_samples=len(batches),
        max_seq_length=arguments.seqlen,
    )
    model.save_pretrained(out, save_compressed=True)
    return time.perf_counter() - started


@torch.no_grad()
def layer_errors(source: Path, quantized: Path, seqlen: int) -> dict[str, float]:
    """The relative output error of every quantized linear, by name."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(DEVICE).eval()
    checkpoint, sums = Checkpoint(quantized), {}
    for name, linear in model.named_modules():
        if (
            isinstance(linear, nn.Linear)
            and (weight := dequantized(checkpoint, name, linear)) is not None
        ):
            sums[name] = torch.zeros(2, dtype=torch.float64, device=DEVICE)
            linear.register_forward_pre_hook(
                counting(sums[name], weight.to(DEVICE).float() - linear.weight.float())
            )
    ids = torch.randint(
        model.config.vocab_size, (HELD_OUT, seqlen), generator=torch.Generator().manual_seed(1)
    )
    for row in ids.to(DEVICE):
        model.model(row[None], use_cache=False)
    return {name: float((lost / power).sqrt()) for name, (lost, power) in sums.items()}


def counting(total: Tensor, difference: Tensor):  # type: ignore[no-untyped-def]
    """A hook that adds ``||X D^T||^2`` and ``||X W^T||^2`` to ``total [2]``."""

    def hook(linear: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].float()
        total[0] += (x @ difference.T).square().sum(dtype=torch.float64)
        total[1] += (x @ linear.weight.float().T).square().sum(dtype=torch.float64)

    return hook


def dequantized(checkpoint: Checkpoint, name: str, linear: nn.Linear) -> Tensor | None:
    """The weight ``[N, K]`` of linear ``name`` as it was quantized; None if it was not."""
    parts = {
        part.removeprefix(f"{name}."): checkpoint.read(part)
        for part in checkpoint.entries
        if part.startswith(f"{name}.")
    }
    n, k = linear.weight.shape
    if checkpoint.config["quantization_config"]["quant_method"] == "qtool":
        found = native_format(checkpoint.config).of(name) if "qweight" in parts else None
        return found.scheme_object.dequantize(*found.unpack(parts, n, k)) if found else None
    foreign = import_format_of(checkpoint.config)
    return foreign.read(parts, n, k).weight() if foreign.weight in parts else None


if __name__ == "__main__":
    main()
