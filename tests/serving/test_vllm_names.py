"""Linears have other names in vLLM than in the checkpoint, or are joined there or already stored as
one.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file

vllm = pytest.importorskip("vllm", reason="vLLM is not installed: make test-serving")

from vllm.model_executor.models.utils import WeightsMapper

from qtool import recipes
from qtool.errors import QtoolError
from qtool.format import native_format
from qtool.io.source import Checkpoint
from qtool.pipeline.quantize import quantize
from qtool.serving.preflight import require_servable
from qtool.serving.verify import layers
from qtool.serving.vllm.config import QtoolConfig
from tests.models.tiny import save_tiny
from tests.serving.conftest import Native, rewritten, rule
from tests.serving.models import configured, loaded


def packed(
    model_type: str,
    work: Path,
    scheme: str = "w8a8",
    layout: str = "row-major-8",
    **changes: Any,
) -> Path:
    """A tiny quantized model of ``model_type``."""
    recipe = recipes.parse({"scheme": scheme, "layers": [rule(scheme, layout)]}, "test")
    source = save_tiny(model_type, work / "source", dtype="bfloat16", **changes)
    return quantize(Checkpoint(source), recipe, work / "packed")


@pytest.mark.parametrize(
    "model_type",
    [
        "glm4",  # gate and up are one linear, which vLLM's mapping says are two
        "bloom",  # vLLM reorders the rows of q, k and v
        "gptj",  # vLLM joins q, k and v, and does not say so
        "gpt_bigcode",  # vLLM renames the blocks by a pattern
        "hyperclovax",  # vLLM's class of configs has other settings than config.json
    ],
)
def test_every_linear_is_found(model_type: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint(packed(model_type, tmp_path))
    rows = list(layers(model := loaded(checkpoint.directory), checkpoint))
    assert not [row for row in rows if row.problem]
    found = [getattr(module, "quant_method", None) for module in model.modules()]
    assert {name for method in found for name in getattr(method, "names", ())} == {
        name.removesuffix(".qweight") for name in checkpoint.entries if name.endswith(".qweight")
    }


@pytest.mark.parametrize(
    "model_type",
    [
        "ernie4_5_moe",
        "exaone_moe",  # vLLM runs transformers' model, which has transformers' names
    ],
)
def test_a_router_s_bias_has_the_name_that_vllm_takes(model_type: str, tmp_path: Path) -> None:
    """It is published under another name than transformers gives it."""
    made = Checkpoint(packed(model_type, tmp_path))
    (bias,) = (name for name in made.entries if name.endswith("e_score_correction_bias"))
    stored = torch.arange(1, 5).view(made.read(bias).shape).to(made.read(bias))
    checkpoint = Checkpoint(rewritten(made.directory, tmp_path / "biased", {bias: stored}))
    model = loaded(checkpoint.directory)
    rows = list(layers(model, checkpoint))
    assert rows and not [row for row in rows if row.problem]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    found = [tensor for name, tensor in tensors if name.endswith("e_score_correction_bias")]
    assert any(torch.equal(tensor.flatten(), stored.flatten()) for tensor in found)


@pytest.mark.parametrize(
    ("model_type", "tower"),
    [
        ("paligemma", "vision_tower."),  # published with "vision_model" between, and loaded so
        ("paddleocr_vl", ""),  # vLLM knows the text model's published names alone
    ],
)
def test_all_of_a_multimodal_model_is_loaded(model_type: str, tower: str, tmp_path: Path) -> None:
    source = save_tiny(model_type, tmp_path / "source", dtype="bfloat16", tie_word_embeddings=True)
    held = load_file(source / "model.safetensors")
    old = {name.replace(tower, f"{tower}vision_model."): tensor for name, tensor in held.items()}
    save_file(old if tower else held, source / "model.safetensors", {"format": "pt"})
    recipe = recipes.parse({"scheme": "w8a8", "layers": [rule("w8a8", "row-major-8")]}, "test")
    checkpoint = Checkpoint(quantize(Checkpoint(source), recipe, tmp_path / "packed"))
    rows = list(layers(loaded(checkpoint.directory), checkpoint))
    assert rows and not [row for row in rows if row.problem]
    unset = loaded(checkpoint.directory, unset=7).named_parameters()
    assert not [name for name, parameter in unset if parameter.numel() and (parameter == 7).all()]


@pytest.mark.parametrize(
    ("model_type", "linear"),
    [("flex_olmo", "mlp.experts.0.gate_proj"), ("falcon_h1", "mamba.in_proj")],
)
def test_linears_that_vllm_keeps_in_16_bits_are_named(
    model_type: str, linear: str, tmp_path: Path
) -> None:
    if model_type == "flex_olmo" and Version(vllm.__version__) >= Version("0.30"):
        pytest.skip("vLLM takes them packed from 0.30 on")
    directory = packed(model_type, tmp_path)
    with pytest.raises(QtoolError, match=rf"^model\.layers\.0\.{linear}: .* takes it packed"):
        loaded(directory)


def test_a_name_is_renamed_once(tmp_path: Path) -> None:
    """A published name that begins with the model's own; inner loaders rename once more."""
    directory, old = packed("cohere2_vision", tmp_path), "model.vision_tower.vision_model"
    settings = Checkpoint(directory).config["quantization_config"]
    config = QtoolConfig.from_config(settings | {"tower_names": {"model.vision_tower": old}})
    hf_config: Any = SimpleNamespace(quantization_config=settings)
    config.maybe_update_config(str(directory), hf_config)
    config.asked.update(config.packed_linears.formats())
    mapper = config.get_cache_scale_mapper()
    once = mapper.apply_list([f"model.vision_tower.{part}" for part in ("head.bias", "encoder")])
    assert once == [f"{old}.head.bias", f"{old}.encoder"]
    assert mapper.apply_list([*once, "lm_head.weight"]) == [*once, "lm_head.weight"]


def test_jamba_is_loaded_with_mixers_in_16_bits(tmp_path: Path) -> None:
    source = save_tiny("jamba", tmp_path / "source", dtype="bfloat16")
    rules = [{"match": r"\.mamba\.", "scheme": None}, rule("w8a8", "row-major-8")]
    recipe = recipes.parse({"scheme": "w8a8", "layers": rules}, "test")
    checkpoint = Checkpoint(quantize(Checkpoint(source), recipe, tmp_path / "packed"))
    rows = list(layers(loaded(checkpoint.directory), checkpoint))
    assert rows and not [row for row in rows if row.problem]


@pytest.mark.parametrize("model_type", ["falcon_mamba", "jamba"])
def test_mixers_of_mamba_1_are_refused(model_type: str, tmp_path: Path) -> None:
    """vLLM, the check before it and the model card say so in the same words."""
    directory = packed(model_type, tmp_path)
    said = r"\.layers\.\d\.\w+\.in_proj: vLLM has the mixers of Mamba 1 in 16 bits alone"
    with pytest.raises(QtoolError, match=said) as refused:
        loaded(directory)
    with pytest.raises(QtoolError) as before:
        require_servable(directory, 1)
    assert str(before.value) == str(refused.value)
    assert f"vLLM cannot serve it: {refused.value}." in (directory / "README.md").read_text()


@pytest.mark.parametrize(
    ("scheme", "layout", "head"),
    [
        ("w4a8-qoq", "compute-aware", 48),  # a head is no whole number of tiles
        ("w4a8-lqq", "dual-mma", 48),
        ("w4a16", "marlin", 64),  # the first dimension of its tensors are inputs
    ],
)
def test_rows_that_vllm_cannot_reorder_are_refused(
    scheme: str, layout: str, head: int, tmp_path: Path
) -> None:
    size = {"hidden_size": 8 * head, "num_attention_heads": 8}
    directory = packed("bloom", tmp_path, scheme, layout, **size)
    with pytest.raises(QtoolError, match=rf"by head, {head} of them, which layout {layout}"):
        loaded(directory)


#: Granite's hybrid with rows in whole tiles
MAMBA = {
    "mamba_n_heads": 128,
    "mamba_d_head": 4,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "num_local_experts": 0,
    "hidden_size": 256,
}


def test_linears_of_mamba_are_found_on_one_gpu_and_refused_on_two(tmp_path: Path) -> None:
    """vLLM gives them a prefix that no module has."""
    checkpoint = Checkpoint(packed("granitemoehybrid", tmp_path, **MAMBA))
    rows = list(layers(loaded(checkpoint.directory), checkpoint))
    assert [row for row in rows if row.name.endswith("in_proj")]
    assert not [row for row in rows if row.problem]
    with pytest.raises(QtoolError, match=r"in_proj: 2 ranks would share a group"):
        loaded(checkpoint.directory, 0, 2)


def test_parts_of_a_model_rename_in_turn(native: Native) -> None:
    """A wrapper's text model and its tower have mappers too."""
    config = configured(native()).quant_config
    assert isinstance(config, QtoolConfig)
    for renamed in ({"model.": "language_model.model."}, {"layers.": "blocks."}):
        config.apply_vllm_mapper(WeightsMapper(orig_to_new_substr=renamed))
    config.apply_vllm_mapper(WeightsMapper(orig_to_new_regex={}))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    stored = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    for parent in ("model.layers", "language_model.model.layers", "language_model.model.blocks"):
        assert config.shards(f"{parent}.0.self_attn.qkv_proj") == stored
    assert config.shards("vision_tower.layers.0.fc1") == ["vision_tower.layers.0.fc1"]


def test_blocks_of_other_ranks_are_not_missed(native: Native) -> None:
    checkpoint = Checkpoint(native())
    config = QtoolConfig(native_format(checkpoint.config))
    config.maybe_update_config(
        str(checkpoint.directory), hf_config=configured(checkpoint.directory).model_config.hf_config
    )
    with pytest.raises(QtoolError, match=r"q_proj: this vLLM has no layer"):
        config.require_asked()  # vLLM asked for none at all
    config.shards("mtp.layers.0.self_attn.q_proj")  # a drafter, of which no block is packed
    config.require_asked()
    config.shards("model.layers.0.mlp.down_proj")
    with pytest.raises(QtoolError, match=r"q_proj: this vLLM has no layer"):
        config.require_asked()
