"""vLLM's own loaders take the experts of exports one by one, also where they are published as one
stack.
"""

import importlib
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving")

from packaging.version import Version

import qtool
from qtool.exchange.export import export
from qtool.exchange.exportable import SPLIT_EXPERTS
from qtool.exchange.formats import compressed_tensors
from qtool.io.source import Checkpoint
from qtool.models.auto import auto_class
from qtool.pipeline.quantize import quantize
from qtool.runtime.linear import QuantLinear
from tests.exchange.conftest import recipe_of
from tests.exchange.conftest import rule as rule_of
from tests.models.tiny import save_tiny
from tests.serving.models import loaded

WRAPPERS = ("llama4", "qwen3_vl_moe")
#: in config.json as published, not in transformers' class
PUBLISHED = {"qwen3_vl_moe": {"norm_topk_prob": True}}
MAMBA = {"granitemoehybrid": {"mamba_n_heads": 32, "mamba_d_head": 8}}  # rows in whole tiles
#: more of vLLM's methods of packed experts, where their kernels are chosen
METHODS = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
UNSET = -77
ROLES = {"gate_proj": ("w13", 0), "up_proj": ("w13", 1), "down_proj": ("w2", 0)}
LINEAR = re.compile(r"layers\.(\d+)\..*experts\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)$")
MIXTRAL = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM looks for a kernel of packed experts when it makes a layer; a CPU has none."""
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend

    for name in ("compressed_tensors_moe_wna16", "compressed_tensors_moe_wna16_marlin"):
        if find_spec(f"{METHODS}.{name}"):
            method = importlib.import_module(f"{METHODS}.{name}")
            chosen = WNA16MoEBackend.MARLIN, None
            choose = "select_wna16_moe_backend"
            monkeypatch.setattr(method, choose, lambda *_, c=chosen, **__: c, raising=False)


def exported(model_type: str, work: Path, rules: list[dict[str, Any]]) -> tuple[Path, Path]:
    """A tiny bfloat16 model quantized by ``rules``, and its compressed-tensors export."""
    save_tiny(model_type, work / "float32", **MAMBA.get(model_type, {}))
    config = AutoConfig.from_pretrained(work / "float32")
    model = auto_class(config).from_pretrained(work / "float32", dtype=torch.bfloat16)
    model.save_pretrained(work / "source")
    path = work / "source" / "config.json"
    settings = json.loads(path.read_text())
    settings.get("text_config", settings).update(PUBLISHED.get(model_type, {}))
    path.write_text(json.dumps(settings))
    native = quantize(Checkpoint(work / "source"), recipe_of(rules), work / "native")
    return native, export(native, "compressed-tensors", work / "out").directory


def expert_weights(model: nn.Module, sizes: dict[str, tuple[int, int]]) -> dict[str, Tensor]:
    """The weight of each packed expert that vLLM holds, by ``layer.expert.role``."""
    stacks = {
        (found[1], found[2], found[3]): parameter.detach()
        for name, parameter in model.named_parameters()
        if (found := re.search(r"layers\.(\d+)\..*\.(w13|w2)_(weight(?:_packed|_scale)?)$", name))
    }
    weights = {}
    for key, (n, k) in sizes.items():
        layer, expert, role = key.split(".")
        stack, half = ROLES[role]
        parts = {}
        for part in ("weight", "weight_packed", "weight_scale"):
            if (layer, stack, part) in stacks:
                tensor = stacks[layer, stack, part][int(expert)]
                if part != "weight" and tensor.shape[0] % n:  # inputs before outputs in 0.26
                    tensor = tensor.t()
                parts[part] = tensor[half * n : (half + 1) * n].contiguous()
        packed = "weight_packed" in parts
        weights[key] = (
            compressed_tensors.read(parts, n, k).weight() if packed else parts["weight"].float()
        )
    return weights


def assert_loaded(native: Path, out: Path) -> None:
    """vLLM's model of ``out`` has each expert of ``native`` in its place, and nothing unset."""
    ours = {
        f"{found[1]}.{found[2]}.{MIXTRAL.get(found[3], found[3])}": linear
        for name, linear in qtool.load(native).named_modules()
        if (found := LINEAR.search(name))
    }
    assert ours
    model = loaded(out, unset=UNSET, skip_tokenizer_init=True)
    theirs = expert_weights(model, {k: (m.out_features, m.in_features) for k, m in ours.items()})
    for key, linear in ours.items():
        packed = isinstance(linear, QuantLinear)
        weight = linear.dequantize() if packed else linear.weight.float()
        assert torch.equal(theirs[key], weight), key
    unset = [
        name
        for name, parameter in model.named_parameters()
        if "g_idx" not in name and ".attn." not in name and bool((parameter == UNSET).all())
    ]
    assert not unset


@pytest.mark.parametrize(("scheme", "size"), [("w4a16", 64), ("w4a16", "channel")])
@pytest.mark.parametrize("model_type", SPLIT_EXPERTS)
def test_stacked_experts(model_type: str, scheme: str, size: Any, tmp_path: Path) -> None:
    if Version(vllm.__version__) < Version(SPLIT_EXPERTS[model_type]):
        pytest.skip(f"vLLM {SPLIT_EXPERTS[model_type]} is the first that takes them")
    if size == "channel" and "llama4" in model_type and Version(vllm.__version__) < Version("0.33"):
        pytest.skip("vLLM 0.33 is the first with a kernel for them")
    if model_type in WRAPPERS and not find_spec("torchvision"):
        pytest.skip("vLLM's class needs torchvision")
    assert_loaded(*exported(model_type, tmp_path, [rule_of(scheme, size)]))


@pytest.mark.parametrize(
    "rules",
    [
        [rule_of("w4a16", 32, "self_attn"), rule_of("w4a16", 128)],
        [rule_of("w4a16", 128, "self_attn"), rule_of(None)],
    ],
    ids=["group sizes", "experts in 16 bits"],
)
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "llama4_text"])
def test_experts_stored_otherwise(model_type: str, rules: list[Any], tmp_path: Path) -> None:
    """Than attention is."""
    assert_loaded(*exported(model_type, tmp_path, rules))
