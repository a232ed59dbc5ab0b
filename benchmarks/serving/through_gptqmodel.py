"""Load our gptq, gptq-v2, awq and qqq exports with GPTQModel's torch backends on CPU and compare
logits.

    pip install gptqmodel
    python benchmarks/serving/through_gptqmodel.py

GPTQModel is an independent loader and heavy to install, so this is a script and no test. It makes a
random model, quantizes and exports it, and prints for every case the relative distance between
GPTQModel and qtool's own model with the exported weights: the largest distance of a linear's
outputs on the same input, and the distance of the logits. The exit code is 1 if a linear is beyond
the limit. (QQQ's logits differ more than its linears: an activation that fp16 moves across a
rounding boundary is one int8 step away from ours.)
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from qtool import recipes
from qtool.exchange import export_formats
from qtool.exchange.export import export
from qtool.io.model_directory import DEMO
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.runtime.huggingface import dequantized, quantized_linears
from qtool.runtime.load import load

try:
    from gptqmodel import BACKEND, GPTQModel
except ImportError:
    sys.exit("through_gptqmodel.py: GPTQModel is not installed: pip install gptqmodel")

IDS = torch.arange(48).reshape(2, 24) * 5 % 320
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 256,
}
#: format, scheme, group size, GPTQModel's backend
CASES = (
    ("gptq", "w4a16", 128, BACKEND.GPTQ_TORCH),
    ("gptq", "w4a16", 32, BACKEND.GPTQ_TORCH),
    ("gptq", "w4a16", "channel", BACKEND.GPTQ_TORCH),
    ("gptq-v2", "w4a16", 128, BACKEND.GPTQ_TORCH),
    ("awq", "w4a16", 128, BACKEND.AWQ_TORCH),
    ("awq", "w4a8-qoq", "channel", BACKEND.AWQ_TORCH),
    ("awq", "w4a8-qoq-g128", 128, BACKEND.AWQ_TORCH),
    ("qqq", "w4a16", 128, BACKEND.QQQ_TORCH),
    ("qqq", "w4a16", "channel", BACKEND.QQQ_TORCH),
)
#: largest distance of a linear's outputs, whose sums are in half precision
LIMIT = 1e-3


def main() -> None:
    failed = False
    with tempfile.TemporaryDirectory() as directory:
        for variant in ("llama", "qwen2"):
            source = _model(variant, Path(directory) / variant)
            for index, (name, scheme, size, backend) in enumerate(CASES):
                native, out = (
                    Path(directory) / f"{variant}-{index}-{kind}" for kind in ("native", "out")
                )
                rules = [{"match": ".*", "scheme": scheme, "group_size": size}]
                quantize(
                    Checkpoint(source), recipes.parse({"scheme": "t", "layers": rules}, "t"), native
                )
                export(native, name, out)
                theirs = GPTQModel.load(
                    str(out), device="cpu", backend=backend, dtype=torch.float16
                )
                ours = _expected(native, out, name)
                worst = max(
                    _distance(theirs.model.get_submodule(n), m) for n, m in _linears(ours).items()
                )
                failed |= worst > LIMIT
                logits = _relative(_logits(theirs.model), _logits(ours))
                print(
                    f"{variant:6} {name:8} {scheme:14} {size!s:8} linears {worst:.1e}  logits "
                    f"{logits:.1e}"
                )
    sys.exit(failed)


def _model(variant: str, directory: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(variant, **SIZES, tie_word_embeddings=False)
    )
    model.half().save_pretrained(directory)
    for file in DEMO.glob("tokenizer*"):  # GPTQModel requires a tokenizer
        shutil.copy(file, directory)
    return directory


def _expected(native: Path, out: Path, name: str) -> nn.Module:
    """Our model in float32 with the weights that a loader of the export computes with."""
    target = export_formats.get(name)
    checkpoint = Checkpoint(out)
    model = load(native, dtype=torch.float32)
    weights = {}
    for linear, module in quantized_linears(model).items():
        stored = {
            part.removeprefix(f"{linear}."): checkpoint.read(part)
            for part in checkpoint.entries
            if part.startswith(f"{linear}.")
        }
        weights[linear] = target.weight(
            module.format, stored, module.out_features, module.in_features
        )
    model = dequantized(model)
    for linear, weight in weights.items():
        plain = model.get_submodule(linear)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        if name == "qqq":
            plain.register_forward_pre_hook(_int8)
    return model


def _int8(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
    """Activations as GPTQModel quantizes them for QQQ: per token, amax / 127, that quotient in
    fp16.
    """
    scale = (args[0].half().abs().amax(-1, keepdim=True) / 127).float()
    return ((args[0] / scale).round().clamp(-128, 127) * scale,)


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    found = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    return {name: module for name, module in found.items() if name != "lm_head"}


@torch.no_grad()
def _distance(theirs: nn.Module, ours: nn.Linear) -> float:
    x = torch.randn(16, ours.in_features, generator=torch.Generator().manual_seed(0)).half()
    return _relative(theirs(x), ours(x.float()))


@torch.no_grad()
def _logits(model: nn.Module) -> Tensor:
    return model(IDS).logits


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


if __name__ == "__main__":
    main()
