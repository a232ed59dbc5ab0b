"""One row of the comparison with the peers, inside the environment that ``peers.py`` made.

    python benchmarks/accuracy/peer_run.py ROW --work DIR [the options of peers.py]

It quantizes with one tool, stores the result in the tool's format, loads that in float32, evaluates
it, and writes ``DIR/ROW.json``. If a tool does not store its result, or cannot load it on a CPU,
the model that it returns is evaluated. Every tool gets the same calibration windows as token ids.
Time runs from opening the model to the result, on a CPU as the seconds of all threads; imports are
not counted. Everything is computed in float32, on a GPU without TF32.
"""

import argparse
import importlib
import json
import os
import resource
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from schemes import evaluated
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import qtool
from qtool.data import corpora
from qtool.data.windows import bos_of, cut, token_ids
from qtool.exchange.import_formats import import_format_of
from qtool.io.model_directory import directory_of
from qtool.io.source import Checkpoint
from qtool.pipeline.inspect import total
from qtool.runtime.load import load_as_stored

#: a function that stores a model in the path, or returns it
Run = Callable[[argparse.Namespace, Path], PreTrainedModel | None]
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
    # before tools patch it
    base = load_as_stored(directory_of(arguments.model), dtype=torch.float32)
    clock = time.process_time if arguments.device == "cpu" else time.monotonic
    started = clock()
    model = run(arguments, out)
    seconds = clock() - started
    if arguments.device == "cpu":
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    else:
        peak = torch.cuda.max_memory_allocated()
    torch.set_float32_matmul_precision("highest")  # a tool may have changed it
    base.to(arguments.device)
    if model is None:
        model = base if arguments.row == "full" else stored(out, base, arguments)
    found = evaluated(model, arguments, base)
    found |= {"device": arguments.device, "seconds": seconds, "megabytes_peak": peak / 1e6}
    if module == "qtool" and out.exists():
        found["bits"] = total("", (row for row in qtool.inspect(out) if row.layout)).bits
    record = arguments.work / f"{arguments.row}.json"
    record.write_text(json.dumps(found))  # kept even if the tasks fail
    if arguments.tasks:
        record.write_text(json.dumps(found | {"tasks": zero_shot(model, arguments)}))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="demo", help="a directory, or demo")
    parser.add_argument(
        "--calib", default="demo", help="calibration text: a file, or a corpus that qtool knows"
    )
    parser.add_argument("--text", default="demo", help="evaluated text: likewise")
    parser.add_argument("--samples", type=int, default=128, help="calibration windows")
    parser.add_argument("--seqlen", type=int, default=512)
    parser.add_argument("--limit", type=int, default=32, help="windows evaluated")
    parser.add_argument("--tasks", default="", help="zero-shot ones of qtool eval, with commas")
    parser.add_argument("--items", type=int, help="of a task; all by default")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, of every tool")
    parser.add_argument("--work", type=Path, default=Path("out/peers"))


def stored(
    directory: Path, base: PreTrainedModel, arguments: argparse.Namespace
) -> PreTrainedModel:
    """A tool's stored model in float32; GPTQ files are dequantized here, without their kernels."""
    directory = next(
        directory.rglob("config.json")
    ).parent  # AutoRound makes a folder of its own inside
    checkpoint = Checkpoint(directory)
    if checkpoint.config["quantization_config"]["quant_method"] != "gptq":
        return load_as_stored(directory, device=arguments.device, dtype=torch.float32)
    source, foreign = Checkpoint(directory_of(arguments.model)), import_format_of(checkpoint.config)
    tensors = {name: source.read(name) for name in source.entries}
    for packed in [name for name in checkpoint.entries if name.endswith(".qweight")]:
        linear = packed.removesuffix(".qweight")
        parts = {
            part.removeprefix(f"{linear}."): checkpoint.read(part)
            for part in checkpoint.entries
            if part.startswith(f"{linear}.")
        }
        shape = tensors[f"{linear}.weight"].shape
        tensors[f"{linear}.weight"] = foreign.read(parts, *shape).weight()
    model = base.from_pretrained(None, config=base.config, state_dict=tensors, dtype=torch.float32)
    return model.to(arguments.device).eval()


def zero_shot(model: PreTrainedModel, arguments: argparse.Namespace) -> dict[str, Any]:
    """The accuracy of each task and its standard error."""
    results, _ = qtool.evaluate(
        arguments.tasks.split(","),
        model,
        tokenizer=qtool.load_tokenizer(arguments.model),
        limit=arguments.items,
        batch_size=1 if arguments.row.startswith("quark") else 16,  # it shares scales in a batch
    )
    found = {task.task: task.metrics["acc"] for task in results.tasks}
    return {name: (accuracy.value, accuracy.stderr) for name, accuracy in found.items()}


def calibration(arguments: argparse.Namespace) -> list[dict[str, Tensor]]:
    """The windows that qtool draws with its seed 0, as batches of one."""
    source = Checkpoint(directory_of(arguments.model))
    text = corpora.load(arguments.calib, split="train").text
    vocabulary = source.config["vocab_size"]
    tokenizer = AutoTokenizer.from_pretrained(source.directory)
    ids = token_ids(text, tokenizer, vocabulary)
    windows = cut(
        ids,
        samples=arguments.samples,
        seqlen=arguments.seqlen,
        vocabulary=vocabulary,
        seed=SEED,
        bos=bos_of(ids, tokenizer),
    )
    return [
        {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in windows
    ]


def full(arguments: argparse.Namespace, out: Path) -> None:
    """Full precision: there is nothing to do."""


def ours(
    scheme: str | None,
    recipe: str,
    arguments: argparse.Namespace,
    out: Path,
    windows: str | None = None,
) -> None:
    """A recipe of qtool, with its own kind of calibration windows unless ``windows`` is given."""
    qtool.quantize(
        arguments.model,
        scheme,
        out=out,
        recipe=recipe,
        calibration=arguments.calib,
        samples=arguments.samples,
        seqlen=arguments.seqlen,
        seed=SEED,
        windows=windows,
        device=arguments.device,
    )


def llm_compressor(
    scheme: str,
    arguments: argparse.Namespace,
    out: Path,
    smooth: float | None = None,
    rotations: str = "",
    matrix: str = "hadamard",
    observer: str = "memoryless_minmax",
    group: int | None = None,
    act_group: int | None = None,
) -> PreTrainedModel | None:
    """GPTQ after other modifiers; R4 and mixtures, which transformers does not load as they are
    stored, are evaluated in memory.

    Args:
        smooth: strength of SmoothQuant before GPTQ.
        rotations: SpinQuant's rotations before GPTQ, like ``"R1 R2"``.
        matrix: kind of the rotations.
        observer: observer of the weights' ranges.
        group: channels that share a scale of weights; None takes the scheme's.
        act_group: channels that share a scale of activations; None means the whole token.
    """
    from compressed_tensors.offload import remove_dispatch
    from compressed_tensors.quantization import QuantizationStrategy, preset_name_to_scheme
    from llmcompressor import oneshot
    from llmcompressor.modeling.moe.linearize import load_quantizable_moe
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from llmcompressor.modifiers.transform.spinquant import SpinQuantModifier

    layers = preset_name_to_scheme(scheme, ["Linear"])
    layers.weights.observer = observer
    if group:
        layers.weights.group_size = group
    if act_group:
        layers.input_activations.strategy = QuantizationStrategy.GROUP
        layers.input_activations.group_size = act_group
    with load_quantizable_moe():
        model, tokenizer = _opened(arguments)
    recipe: list[Any] = []
    if rotations:
        recipe.append(SpinQuantModifier(rotations=rotations.split(), transform_type=matrix))
    if smooth is not None:
        recipe.append(SmoothQuantModifier(smoothing_strength=smooth))
    recipe.append(GPTQModifier(config_groups={"all": layers}, ignore=["lm_head"]))
    batches = calibration(arguments)
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=torch.utils.data.DataLoader(batches, batch_size=None),
        recipe=recipe,
        num_calibration_samples=len(batches),
        max_seq_length=arguments.seqlen,
    )
    if "R4" in rotations or hasattr(model.config, "num_experts"):
        return remove_dispatch(model).to(arguments.device)
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)
    return None


def gptqmodel(arguments: argparse.Namespace, out: Path, **options: Any) -> None:
    """GPTQ, with ``options`` of its configuration."""
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    config = QuantizeConfig(bits=4, group_size=128, sym=True, **options)
    model = GPTQModel.load(
        str(directory_of(arguments.model)), config, device=arguments.device, dtype=torch.float32
    )
    batches = [{name: ids[0] for name, ids in batch.items()} for batch in calibration(arguments)]
    model.quantize(batches, batch_size=1, backend=BACKEND.GPTQ_TORCH)
    model.save(str(out))


def autoround(
    scheme: str | dict[str, Any],
    form: str | None,
    arguments: argparse.Namespace,
    out: Path,
    **options: Any,
) -> PreTrainedModel | None:
    """Learned rounding, stored in the format ``form``; the model itself if there is none."""
    from auto_round import AutoRound
    from auto_round.modeling.unfused_moe import apply_model_monkey_patches

    # experts of a mixture as linears
    apply_model_monkey_patches(str(directory_of(arguments.model)))
    model, tokenizer = _opened(arguments)
    batches = calibration(arguments)
    tuner = AutoRound(
        model,
        tokenizer,
        scheme=scheme,
        dataset=torch.utils.data.DataLoader(batches, batch_size=None),
        seqlen=arguments.seqlen,
        nsamples=len(batches),
        batch_size=8,
        device_map=arguments.device,
        seed=SEED,
        amp=False,
        enable_torch_compile=False,
        **options,
    )
    if form is None:
        return tuner.quantize()[0].to(arguments.device)
    tuner.quantize_and_save(str(out), format=form)
    return None


def quark(
    scheme: str,
    arguments: argparse.Namespace,
    out: Path,
    rotations: str = "r1 r2",
) -> PreTrainedModel:
    """Qronos after rotations; returns the frozen model.

    Args:
        scheme: like ``w4a8``; 4 bits are in groups of 128, 8 bits per channel or per token.
        rotations: SpinQuant's names, like ``"r1 r2"``.
    """
    # its quantizers are compiled on import, which fails while qtool's arithmetic is deterministic
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    from quark.torch import LLMTemplate, ModelQuantizer
    from quark.torch.quantization.config.config import (
        Int4PerGroupSpec,
        Int8PerChannelSpec,
        QLayerConfig,
    )

    def spec(bits: str, axis: int, dynamic: bool) -> Any:
        if bits == "4":
            made = Int4PerGroupSpec(ch_axis=-1, group_size=128, is_dynamic=dynamic)
        else:
            made = Int8PerChannelSpec(ch_axis=axis, symmetric=True, is_dynamic=dynamic)
        return made.to_quantization_spec()

    weights, activations = scheme[1], scheme.partition("a")[2]
    inputs = None if activations == "16" else spec(activations, axis=1, dynamic=True)
    layer = QLayerConfig(weight=spec(weights, axis=0, dynamic=False), input_tensors=inputs)
    LLMTemplate.register_scheme(scheme, config=layer)
    model, _ = _opened(arguments)
    model.to(arguments.device)
    template = LLMTemplate.get(model.config.model_type)
    rotation = (template.algo_config or {}).get("rotation")
    if rotation is None:
        raise NotImplementedError(f"Quark's template of {model.config.model_type} has no rotation")
    for name in ("r1", "r2", "r3", "r4"):
        setattr(rotation, name, name in rotations.split())
    ids = [batch["input_ids"][0].to(arguments.device) for batch in calibration(arguments)]
    quantizer = ModelQuantizer(template.get_config(scheme, algorithm=["rotation", "qronos"]))
    loader = torch.utils.data.DataLoader(ids, batch_size=1)
    return quantizer.freeze(quantizer.quantize_model(model, loader))


def _opened(arguments: argparse.Namespace) -> tuple[PreTrainedModel, AutoTokenizer]:
    """Model and tokenizer, in float32 as in all evaluations here."""
    directory = directory_of(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(directory)


#: llm-compressor with its best observer
clipped = partial(llm_compressor, observer="mse")
#: AutoRound's preset INT8 at the bits and groups of the other tools
AR_W4A8 = {
    "bits": 4,
    "group_size": 128,
    "sym": True,
    "data_type": "int",
    "act_bits": 8,
    "act_group_size": -1,
    "act_data_type": "int",
    "act_dynamic": True,
    "act_sym": True,
}
AR_W4A4 = AR_W4A8 | {"act_bits": 4, "act_group_size": 128}
#: auto-round-best's iterations, with the extended algorithm
LONG = {"iters": 1000, "enable_alg_ext": True}
EVERYWHERE = str(Path(__file__).with_name("w4a4-everywhere.yaml"))
#: by name of a row: the module to import before the clock starts, and the function to run
ROWS: dict[str, tuple[str, Run]] = {
    "full": ("qtool", full),
    "qtool-w4a16-best": ("qtool", partial(ours, "w4a16", "best")),
    "qtool-w4a16-given": ("qtool", partial(ours, "w4a16", "best", windows="given")),
    "qtool-w4a16-paper": ("qtool", partial(ours, "w4a16", "paper")),
    "llm-compressor-w4a16": ("llmcompressor", partial(llm_compressor, "W4A16")),
    "llm-compressor-w4a16-best": ("llmcompressor", partial(clipped, "W4A16")),
    "gptqmodel-w4a16": ("gptqmodel", gptqmodel),
    "gptqmodel-w4a16-best": ("gptqmodel", partial(gptqmodel, mse=2.4)),
    "autoround-w4a16": ("auto_round", partial(autoround, "W4A16", "auto_gptq")),
    "autoround-w4a16-best": ("auto_round", partial(autoround, "W4A16", "auto_gptq", **LONG)),
    "quark-w4a16": ("quark", partial(quark, "w4a16")),
    "qtool-w8a8-best": ("qtool", partial(ours, "w8a8", "best")),
    "llm-compressor-w8a8": ("llmcompressor", partial(llm_compressor, "W8A8", smooth=0.8)),
    "autoround-w8a8": ("auto_round", partial(autoround, "INT8", None)),
    "quark-w8a8": ("quark", partial(quark, "w8a8")),
    "qtool-w4a8-qoq-g128-best": ("qtool", partial(ours, "w4a8-qoq-g128", "best")),
    "qtool-w4a8-lqq-best": ("qtool", partial(ours, "w4a8-lqq", "best")),
    "llm-compressor-w4a8": ("llmcompressor", partial(llm_compressor, "W4A8")),
    "llm-compressor-w4a8-best": ("llmcompressor", partial(clipped, "W4A8")),
    "llm-compressor-w4a8-g64": ("llmcompressor", partial(clipped, "W4A8", group=64)),
    "autoround-w4a8": ("auto_round", partial(autoround, AR_W4A8, None)),
    "quark-w4a8": ("quark", partial(quark, "w4a8")),
    "qtool-w4a4-everywhere": ("qtool", partial(ours, None, EVERYWHERE)),
    "qtool-w4a4-best": ("qtool", partial(ours, "w4a4-g128", "best")),
    "llm-compressor-w4a4": ("llmcompressor", partial(clipped, "W4A4", act_group=128)),
    "llm-compressor-w4a4-best": (
        "llmcompressor",
        partial(clipped, "W4A4", rotations="R1 R2 R4", matrix="random-hadamard", act_group=128),
    ),
    "autoround-w4a4": ("auto_round", partial(autoround, AR_W4A4, None)),
    "quark-w4a4": ("quark", partial(quark, "w4a4", rotations="r1 r2 r4")),
}

if __name__ == "__main__":
    main()
