"""What SGLang's loaders ask: the name of a joined module, of none of its linears.

Read in SGLang 0.5.23 (``layers/quantization``: ``get_dynamic_override``, ``is_layer_skipped_awq``,
``should_ignore_layer`` and ``find_matched_target`` where a class has no ``packed_modules_mapping``,
as Llama's). A weight of a module that it takes for quantized is left out there without a word.
"""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from qtool.errors import QtoolError
from qtool.exchange.export import export
from qtool.io.source import Checkpoint
from tests.conftest import MakeModel
from tests.exchange.conftest import rule
from tests.exchange.test_vllm_rules import native, shapes
from tests.exchange.vllm_rules import modules
from tests.models.tiny import save_tiny

JOINED = {"q_proj+k_proj+v_proj": "qkv_proj", "gate_proj+up_proj": "gate_up_proj"}


def skipped(quantization: dict[str, Any], module: str) -> bool:
    """Whether SGLang leaves a module in 16 bits."""
    if quantization["quant_method"] == "compressed-tensors":
        return module in quantization["ignore"]
    if quantization["quant_method"] == "awq":
        return any(name in module for name in quantization["modules_to_not_convert"])
    rules = [rule[2:] for rule in quantization["dynamic"] if rule.startswith("-:")]
    return any(re.match(rule, module) for rule in rules)


@pytest.mark.parametrize("name", ["gptq", "awq", "compressed-tensors"])
@pytest.mark.parametrize("variant", ["llama", "phi3", "qwen3_moe", "mixtral"])
def test_a_joined_module_is_found_by_its_name(
    variant: str, name: str, make_model: MakeModel, tmp_path: Path
) -> None:
    source = make_model(variant, dtype=torch.bfloat16)
    rules = [
        rule(None, match=r"\.0\..*(q_proj|k_proj|v_proj|qkv_proj)$"),
        rule(None, match=r"\.1\.(mlp|block_sparse_moe)\."),
        rule("w4a16", 128),
    ]
    out = export(native(source, rules), name, tmp_path / "out").directory
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    stored, found = Checkpoint(out), set()
    for module, linears in modules(shapes(source)).items():
        parent, _, last = module.rpartition(".")
        if (name, last) == ("gptq", "experts"):
            continue  # are quantized to SGLang, whatever the config says
        plain = {f"{linear}.weight" in stored for linear in linears}
        assert plain == {skipped(quantization, f"{parent}.{JOINED.get(last, last)}")}, module
        found |= plain
    assert found == {True, False}


def test_a_joined_module_is_a_target_of_its_group(make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model("llama", dtype=torch.bfloat16)
    ours = native(source, [rule("w4a16", 32, r"(o_proj|down_proj)$"), rule("w4a16", 128)])
    out = export(ours, "compressed-tensors", tmp_path / "out").directory
    groups = json.loads((out / "config.json").read_text())["quantization_config"]["config_groups"]
    for module, linears in modules(shapes(source)).items():
        parent, _, last = module.rpartition(".")
        asked = {f"{parent}.{JOINED.get(last, last)}", *linears}
        assert sum(asked <= set(group["targets"]) for group in groups.values()) == 1, module


MLA = "fused_qkv_a_proj_with_mqa", ["q_a_proj", "kv_a_proj_with_mqa"]
DELTA = "in_proj_qkvz", ["in_proj_qkv", "in_proj_z"]
#: too narrow to be quantized
NARROW: tuple[str, list[str]] = ("in_proj_ba", [])


@pytest.mark.parametrize("name", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("kind", "parent", "joined"),
    [
        ("qwen3_5_text", "linear_attn", DELTA),
        ("qwen3_5_text", "linear_attn", NARROW),
        ("deepseek_v3", "self_attn", MLA),
    ],
)
def test_what_some_models_join(
    kind: str, parent: str, joined: tuple[str, list[str]], name: str, tmp_path: Path
) -> None:
    source, (module, linears) = save_tiny(kind, tmp_path / "source"), joined
    plain = [rule(None, match=rf"\.{linear}$") for linear in linears]
    out = export(native(source, [*plain, rule("w4a16", 128)]), name, tmp_path / "out").directory
    quantization = json.loads((out / "config.json").read_text())["quantization_config"]
    assert skipped(quantization, f"model.layers.0.{parent}.{module}")
    assert not skipped(quantization, "model.layers.0.mlp.down_proj")


@pytest.mark.parametrize(("kind", "joined"), [("qwen3_5_text", DELTA), ("deepseek_v3", MLA)])
def test_what_some_models_join_is_stored_alike(
    kind: str, joined: tuple[str, list[str]], tmp_path: Path
) -> None:
    source, (_, (first, second)) = save_tiny(kind, tmp_path / "source"), joined
    ours = native(source, [rule(None, match=rf"\.{first}$"), rule("w4a16", 128)])
    with pytest.raises(QtoolError, match=rf"{second} is w4a16 .*{first} is in 16 bits"):
        export(ours, "compressed-tensors", tmp_path / "out")
