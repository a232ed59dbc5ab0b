"""Small native checkpoints of every scheme, wide enough to be cut among four ranks."""

import importlib.util
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool import recipes
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.runtime.dispatch import KERNELS
from qtool.schemes import get
from tests.conftest import save_model

collect_ignore = ["models.py"]  # no test, and it needs vLLM
if importlib.util.find_spec("vllm"):  # it sets vLLM's platform before any test's module asks for it
    importlib.import_module("tests.serving.models")

#: a rank of four has rows of 64 at least and columns of 128
SHAPES: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "moe_intermediate_size": 512,
}
#: what these sizes are called elsewhere, or follow from others
OWN: dict[str, dict[str, Any]] = {
    "opt": {"word_embed_proj_dim": 512, "ffn_dim": 1024, "num_key_value_heads": None},
    "falcon": {"head_dim": None, "num_key_value_heads": None},
}
FORMATS = sorted(KERNELS)
#: what a recipe whose down projections read rotated inputs has besides
ROTATED: dict[str, Any] = {"transforms": ["online-hadamard"]}

#: (scheme, layout, variant of the model, options) -> the directory of the native checkpoint
Native = Callable[..., Path]


def rule(scheme: str, layout: str, match: str = ".*") -> dict[str, Any]:
    """A recipe's rule: ``scheme`` at its own group size."""
    return {
        "match": match,
        "scheme": scheme,
        "group_size": get(scheme).group_size or "channel",
        "layout": layout,
    }


def rewritten(
    directory: Path, out: Path, tensors: dict[str, torch.Tensor], *, drop: str = "", **more: Any
) -> Path:
    """``directory`` with ``tensors`` added or replaced and one dropped, in one file at ``out``.

    ``more`` goes into its quantization_config.
    """
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= more
    stored: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        stored |= load_file(file)
    stored.pop(drop, None)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    save_file(stored | tensors, out / "model.safetensors")
    return out


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    """``native(scheme, layout, variant, rules)``: a random model, rounded to nearest."""

    @cache
    def source(variant: str) -> Path:
        sizes = SHAPES | OWN.get(variant.partition("-")[0], {})
        return save_model(
            tmp_path_factory.mktemp("source") / variant, variant, dtype=torch.bfloat16, **sizes
        )

    def make(
        scheme: str = "w4a8-lqq", layout: str = "dual-mma", variant: str = "llama", **more: Any
    ) -> Path:
        key = json.dumps([scheme, layout, variant, more])
        if key not in made:
            rules = more.pop("rules", [rule(scheme, layout)])
            recipe = recipes.parse({"scheme": scheme, "layers": rules} | more, "test")
            out = tmp_path_factory.mktemp("native") / scheme
            made[key] = quantize(Checkpoint(source(variant)), recipe, out)
        return made[key]

    made: dict[str, Path] = {}
    return make
