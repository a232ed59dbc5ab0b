"""What the SGLang plugin makes of a configuration, with nothing of SGLang but its names."""

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from qtool.errors import QtoolError
from qtool.format import CheckpointFormat, LinearFormat, Rule
from tests.models.tiny import tiny_config

NAMES = {
    "layers.linear": ["LinearBase"],
    "layers.moe.fused_moe_triton": ["FusedMoE"],
    "layers.quantization.base_config": ["LinearMethodBase", "QuantizationConfig"],
    "layers.quantization.unquant": ["UnquantizedLinearMethod"],
    "layers.parameter": [
        "ChannelQuantScaleParameter",
        "PackedvLLMParameter",
        "RowvLLMParameter",
    ],
}
#: modules in SGLang, not tensors and configurations
MODULES = ("LinearBase", "FusedMoE")


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """:mod:`qtool.serving.sglang.config`."""
    before = set(sys.modules)
    for path, names in NAMES.items():
        parts = f"sglang.srt.{path}".split(".")
        for end in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        for name in names:
            made = type(name, (nn.Module if name in MODULES else object,), {})
            setattr(sys.modules[".".join(parts)], name, made)
    yield importlib.import_module("qtool.serving.sglang.config")
    for name in [n for n in sys.modules if n.startswith("qtool.serving.sglang")]:
        if name not in before:
            del sys.modules[name]


def config_of(kind: str, **more: Any) -> dict[str, Any]:
    rules = (Rule(".*", LinearFormat("w8a8", None, "row-major-8")),)
    made = CheckpointFormat("w8a8", rules, **more)
    return {**made.to_dict(), "hf_config": tiny_config(kind)}


def test_joined_linears_are_packed(plugin: Any) -> None:
    made = plugin.QtoolConfig.from_config(config_of("llama"))
    layer = plugin.LinearBase()
    method = made.get_quant_method(layer, "model.layers.1.self_attn.qkv_proj")
    assert [name.rpartition(".")[2] for name in method.names] == ["q_proj", "k_proj", "v_proj"]
    plain = made.get_quant_method(layer, "model.layers.9.mlp.down_proj")
    assert type(plain) is plugin.UnquantizedLinearMethod


def test_what_a_model_joins_without_saying_so_is_packed(plugin: Any) -> None:
    made = plugin.QtoolConfig.from_config(config_of("deepseek_v3"))
    joined = "model.layers.1.self_attn.fused_qkv_a_proj_with_mqa"
    method = made.get_quant_method(plugin.LinearBase(), joined)
    assert [name.rpartition(".")[2] for name in method.names] == ["q_a_proj", "kv_a_proj_with_mqa"]


def test_rotated_inputs(plugin: Any) -> None:
    made = plugin.QtoolConfig.from_config(config_of("llama", rotated=("mlp.down_proj",)))
    layer, mlp = plugin.LinearBase(), "model.layers.1.mlp"
    assert made.get_quant_method(layer, f"{mlp}.down_proj").format.rotated
    assert not made.get_quant_method(layer, f"{mlp}.gate_up_proj").format.rotated
    parted = plugin.QtoolConfig.from_config(config_of("llama", rotated=("mlp.up_proj",)))
    with pytest.raises(QtoolError, match=r"gate_up_proj: .* and inputs rotated alike"):
        parted.get_quant_method(layer, f"{mlp}.gate_up_proj")


@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "qwen2_5_vl"])
def test_a_wrapper_is_refused(plugin: Any, kind: str) -> None:
    with pytest.raises(QtoolError, match=f"{kind}: multimodal models are served by vLLM only"):
        plugin.QtoolConfig.from_config(config_of(kind))


def test_the_cache_that_is_not_used_is_told(plugin: Any, caplog: Any) -> None:
    plugin.QtoolConfig.from_config(config_of("llama", kv="kv8"))
    assert "kv8 cache is not used" in caplog.text
