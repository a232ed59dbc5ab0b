"""AutoRound beside our block distillation: one machine, one checkpoint, the same tokens, bit width
and steps.

    python benchmarks/quantize/distill.py WORK [--layers 1] [--samples 256] [--epochs 10] [--tools
    qtool auto-round]

The script needs auto-round and a GPU. Each tool runs in a fresh process; its log stays in WORK.
``qtool`` and ``auto-round`` learn symmetric 4-bit weights in groups of 128, ``qtool-lqq`` learns
w4a8-lqq. AutoRound has its defaults (8 sequences a step, torch.compile as it decides) and as many
steps as qtool: the epochs over all sequences but the held-out ones. The time of a block is the time
of its learning alone, with a wait for the GPU before and after; the first block includes the
compilation of kernels. The error is the relative error of the last block's output on held-out
random tokens.
"""

import argparse
import functools
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peers import DEVICE, HELD_OUT, dequantized, each_alone, show
from torch import nn
from transformers import AutoModelForCausalLM

from qtool import recipes
from qtool.bench import quantize as bench
from qtool.bench.random_checkpoint import config_of, make
from qtool.calibration.rounding.distill.distill import Distill
from qtool.io.source import Checkpoint

TOOLS = {"qtool": "w4a16", "qtool-lqq": "w4a8-lqq", "auto-round": "W4A16"}
#: AutoRound's default sequences a step
BATCH = 8


def main() -> None:
    """Print the time and error of each tool; with ``--tool``, be the process that one runs in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("work", type=Path)
    parser.add_argument("--tool", choices=TOOLS, help="only quantize by this one, in this process")
    parser.add_argument(
        "--tools", nargs="+", choices=TOOLS, default=list(TOOLS), help="one after another"
    )
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="keep the table here")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="where the GPU's time goes, to the tool's log (slower)",
    )
    arguments = parser.parse_args()
    source = arguments.work / f"{arguments.shape}-{arguments.layers}"
    if arguments.tool:
        alone(arguments, source)
        return
    make(config_of(arguments.shape, arguments.layers), source)
    rows = []
    for tool, facts in each_alone(arguments.tools, arguments.work):
        error = output_error(source, arguments.work / tool, arguments.seqlen)
        rows.append(
            (
                tool,
                f"{facts['seconds']:.1f}",
                " ".join(f"{s:.2f}" for s in facts["blocks"]),
                f"{facts['device_bytes'] / 1e9:.1f}",
                f"{error:.5f}",
            )
        )
        print(rows[-1], flush=True)
    title = (
        f"{arguments.shape}, {arguments.layers} blocks, {arguments.samples} x {arguments.seqlen} "
        f"tokens, {steps(arguments)} steps of {BATCH} sequences"
    )
    show(title, ("tool", "in all, s", "each block, s", "device GB", "error"), rows, arguments.json)


def steps(arguments: argparse.Namespace) -> int:
    """The number of qtool's steps: in every epoch all batches but the held-out ones."""
    batches = -(-arguments.samples // BATCH)
    return int(arguments.epochs * (batches - max(1, round(batches * Distill().held_out))))


def alone(arguments: argparse.Namespace, source: Path) -> None:
    """Quantize by one tool; seconds and peak memory go to its JSON file."""
    blocks: list[float] = []
    run = auto_round if arguments.tool == "auto-round" else ours
    out = arguments.work / arguments.tool
    shutil.rmtree(out, ignore_errors=True)
    seconds = run(arguments, source, out, blocks)
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    facts = {"seconds": seconds, "blocks": blocks, "device_bytes": peak}
    (arguments.work / f"{arguments.tool}.json").write_text(json.dumps(facts))


def timed(owner: Any, attribute: str, blocks: list[float], profile: bool) -> None:
    """Let each call of ``owner.attribute`` add its seconds to ``blocks``."""
    function: Callable[..., Any] = getattr(owner, attribute)

    @functools.wraps(function)
    def measured(*positional: Any, **named: Any) -> Any:
        wait()
        began = time.perf_counter()
        if profile:
            with torch.profiler.profile() as found:
                result = function(*positional, **named)
                wait()
            print(
                found.key_averages().table(
                    sort_by="self_device_time_total", row_limit=40, max_name_column_width=90
                )
            )
        else:
            result = function(*positional, **named)
            wait()
        blocks.append(time.perf_counter() - began)
        print(f"block {len(blocks) - 1}: {blocks[-1]:.2f} s", flush=True)
        return result

    setattr(owner, attribute, measured)


def wait() -> None:
    """Let a GPU finish, so that a clock read next counts its work."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def ours(arguments: argparse.Namespace, source: Path, out: Path, blocks: list[float]) -> float:
    """Seconds of qtool's run, from file to file."""
    learned = recipes.Step(
        "distill",
        {"start": "rtn", "epochs": arguments.epochs, "samples": arguments.samples, "batch": BATCH},
    )
    recipe = replace(
        recipes.load(TOOLS[arguments.tool], "fast"), rounding=learned, variant="custom"
    )
    timed(Distill, "round", blocks, arguments.profile)
    measured = bench.run(
        source, recipe, out, samples=arguments.samples, seqlen=arguments.seqlen, device=DEVICE
    )
    print(measured.table())
    losses = [
        note["distill"]["loss"]
        for note in json.loads((out / "qtool.json").read_text())["blocks"]
        if "distill" in note
    ]
    print(
        "held-out loss by epoch: "
        + "; ".join(" ".join(f"{x:.5f}" for x in curve) for curve in losses)
    )
    return float(measured.record["seconds"])


def auto_round(
    arguments: argparse.Namespace, source: Path, out: Path, blocks: list[float]
) -> float:
    """Seconds from opening the model to the stored result."""
    from auto_round import AutoRound
    from auto_round.algorithms.quantization.sign_round.quantizer import SignRoundQuantizer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    timed(SignRoundQuantizer, "quantize_block", blocks, arguments.profile)
    vocabulary = Checkpoint(source).config["vocab_size"]
    batches = bench.random_tokens(vocabulary, arguments.samples, arguments.seqlen).tokens
    began = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    tool = AutoRound(
        model,
        # required, although the tokens are given as ids
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel())),
        scheme=TOOLS[arguments.tool],
        iters=steps(arguments),
        nsamples=arguments.samples,
        seqlen=arguments.seqlen,
        dataset=list(torch.cat(list(batches)).split(BATCH)),
        **({} if DEVICE == "cuda" else {"device_map": DEVICE}),
    )
    tool.quantize_and_save(str(out))
    return time.perf_counter() - began


@torch.no_grad()
def output_error(source: Path, quantized: Path, seqlen: int) -> float:
    """``||y_quantized - y|| / ||y||`` of the outputs of the last block."""
    found = sorted(quantized.rglob("config.json"), key=lambda path: len(path.parts))
    checkpoint, outputs = Checkpoint(found[0].parent), []
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto").to(DEVICE).eval()
    model.model.norm = nn.Identity()
    ids = torch.randint(
        model.config.vocab_size, (HELD_OUT, seqlen), generator=torch.Generator().manual_seed(1)
    )
    for state in ("float", "quantized"):
        if state == "quantized":
            for name, linear in model.named_modules():
                if (
                    isinstance(linear, nn.Linear)
                    and (weight := dequantized(checkpoint, name, linear)) is not None
                ):
                    linear.weight.data.copy_(weight)
        outputs.append(
            [
                model.model(row[None].to(DEVICE), use_cache=False).last_hidden_state.float()
                for row in ids
            ]
        )
    lost = sum(
        float((a - b).square().sum(dtype=torch.float64)) for a, b in zip(*outputs, strict=True)
    )
    return float(
        (lost / sum(float(a.square().sum(dtype=torch.float64)) for a in outputs[0])) ** 0.5
    )


if __name__ == "__main__":
    main()
