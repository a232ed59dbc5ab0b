"""One row of the comparison with the peers, inside the environment that ``peers.py`` made.

    python benchmarks/accuracy/peer_run.py ROW --work DIR [the options of peers.py]

Quantizes by one tool, stores the result in its own format, loads that again in float32, evaluates
it, and writes ``DIR/ROW.json``. Every tool gets the same calibration windows as token ids.
Wall-clock and CPU time run from opening the model to the stored result; imports before it are not
counted.
"""

import argparse
import copy
import importlib
import json
import resource
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from schemes import evaluated
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import qtool
from qtool.data import corpora
from qtool.data.windows import cut, token_ids
from qtool.exchange.sources import describe
from qtool.io.source import Checkpoint, resolve
from qtool.runtime.load import load

Run = Callable[[argparse.Namespace, Path], None]
SEED = 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("row", choices=ROWS)
    add_options(parser)
    arguments = parser.parse_args()
    module, run = ROWS[arguments.row]
    importlib.import_module(module)
    out = arguments.work / arguments.row
    shutil.rmtree(out, ignore_errors=True)
    started, busy = time.perf_counter(), time.process_time()
    run(arguments, out)
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
    base = load(resolve(arguments.model), dtype=torch.float32)
    model = base if arguments.row == "full" else stored(out, base)
    found = evaluated(model, arguments, base) | {
        "seconds": seconds,
        "cpu_seconds": busy,
        "megabytes_peak": peak,
    }
    (arguments.work / f"{arguments.row}.json").write_text(json.dumps(found))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="a directory, or demo")
    parser.add_argument(
        "--calib", default="demo", help="calibration text: a file, or a corpus that qtool knows"
    )
    parser.add_argument("--text", default="demo", help="evaluated text: likewise")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--limit", type=int, default=32, help="windows evaluated")
    parser.add_argument("--work", type=Path, default=Path("out/peers"))


def stored(directory: Path, base: PreTrainedModel) -> PreTrainedModel:
    """A tool's stored model in float32; GPTQ files are dequantized here, without their kernels."""
    directory = next(
        directory.rglob("config.json")
    ).parent  # AutoRound makes a folder of its own below
    checkpoint = Checkpoint(directory)
    if checkpoint.config["quantization_config"]["quant_method"] != "gptq":
        return load(directory, dtype=torch.float32)
    model, foreign = copy.deepcopy(base), describe(checkpoint.config)
    for name, linear in model.named_modules():
        if f"{name}.qweight" in checkpoint:
            parts = {
                part.removeprefix(f"{name}."): checkpoint.read(part)
                for part in checkpoint.under(name)
            }
            linear.weight.data = foreign.read(
                parts, linear.out_features, linear.in_features
            ).weight()
    return model


def calibration(arguments: argparse.Namespace) -> list[dict[str, Tensor]]:
    """The windows that qtool draws with its seed 0, as batches of one."""
    source = Checkpoint(resolve(arguments.model))
    text, vocabulary = (
        corpora.load(arguments.calib, split="train").text,
        source.config["vocab_size"],
    )
    ids = cut(
        token_ids(text, AutoTokenizer.from_pretrained(source.directory), vocabulary),
        samples=arguments.samples,
        seqlen=arguments.seqlen,
        vocabulary=vocabulary,
        seed=SEED,
    )
    return [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in ids]


def full(arguments: argparse.Namespace, out: Path) -> None:
    """Full precision: nothing to do."""


def ours(scheme: str, variant: str, arguments: argparse.Namespace, out: Path) -> None:
    qtool.quantize(
        arguments.model,
        scheme,
        out=out,
        recipe=variant,
        calibration=arguments.calib,
        samples=arguments.samples,
        seqlen=arguments.seqlen,
        seed=SEED,
    )


def llm_compressor(scheme: str, smooth: bool, arguments: argparse.Namespace, out: Path) -> None:
    """As in its examples: GPTQ with its defaults, SmoothQuant of strength 0.8 before W8A8."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.smoothquant import SmoothQuantModifier

    model, tokenizer = _opened(arguments)
    recipe = [SmoothQuantModifier(smoothing_strength=0.8)] if smooth else []
    recipe.append(GPTQModifier(targets="Linear", scheme=scheme, ignore=["lm_head"]))
    batches = calibration(arguments)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=loader,
        recipe=recipe,
        num_calibration_samples=len(batches),
        max_seq_length=arguments.seqlen,
    )
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


def gptqmodel(arguments: argparse.Namespace, out: Path) -> None:
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=4, group_size=128, sym=True)
    model = GPTQModel.load(str(resolve(arguments.model)), config, device="cpu", dtype=torch.float32)
    batches = [{name: ids[0] for name, ids in batch.items()} for batch in calibration(arguments)]
    model.quantize(batches, batch_size=1, backend=BACKEND.GPTQ_TORCH)
    model.save(str(out))


def autoround(iterations: int, arguments: argparse.Namespace, out: Path) -> None:
    from auto_round import AutoRound

    model, tokenizer = _opened(arguments)
    batches = calibration(arguments)
    loader = torch.utils.data.DataLoader(batches, batch_size=None)
    tuner = AutoRound(
        model,
        tokenizer,
        scheme="W4A16",
        dataset=loader,
        iters=iterations,
        seqlen=arguments.seqlen,
        nsamples=len(batches),
        batch_size=8,
        device_map="cpu",
        seed=SEED,
        amp=False,
    )
    tuner.quantize_and_save(str(out), format="auto_gptq")


def _opened(arguments: argparse.Namespace) -> tuple[PreTrainedModel, AutoTokenizer]:
    """Model and tokenizer; float32, as we calculate."""
    directory = resolve(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(directory)


#: name of a row -> module to import before the clock starts, what to run
ROWS: dict[str, tuple[str, Run]] = {
    "full": ("qtool", full),
    "qtool-w4a16-paper": ("qtool", partial(ours, "w4a16", "paper")),
    "qtool-w4a16-best": ("qtool", partial(ours, "w4a16", "best")),
    "llm-compressor-w4a16": ("llmcompressor", partial(llm_compressor, "W4A16", False)),
    "gptqmodel-w4a16": ("gptqmodel", gptqmodel),
    "autoround-w4a16": ("auto_round", partial(autoround, 200)),
    "qtool-w8a8-best": ("qtool", partial(ours, "w8a8", "best")),
    "llm-compressor-w8a8": ("llmcompressor", partial(llm_compressor, "W8A8", True)),
    "qtool-w4a8-lqq-best": ("qtool", partial(ours, "w4a8-lqq", "best")),
    "qtool-w4a8-qoq-g128-best": ("qtool", partial(ours, "w4a8-qoq-g128", "best")),
    "llm-compressor-w4a8": ("llmcompressor", partial(llm_compressor, "W4A8", False)),
}

if __name__ == "__main__":
    main()
