"""What families refuse, before any work, and that a declaration fits together for every variant."""

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from qtool import models, recipes
from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.models import (
    FAMILIES,
    Attention,
    Experts,
    Family,
    Fold,
    Heads,
    KVCache,
    LinearGroup,
    family_of,
)
from qtool.models.families.falcon import FALCON
from qtool.models.families.llama import DOWN, LLAMA, UP, K, Q, V
from qtool.models.families.phi3 import PHI3
from qtool.models.family import REQUIRED
from qtool.models.family_checks import require_consistent, require_sizes
from qtool.models.unsupported import DECODERS, why_unsupported
from qtool.pipeline.job import Job
from qtool.pipeline.quantize import quantize
from qtool.runtime.huggingface import dequantized, quantized_linears
from qtool.runtime.load import load
from tests.conftest import VARIANTS, MakeModel
from tests.models.tiny import tiny_config


def config_of(source: Path, **changes: Any) -> dict[str, Any]:
    return {**json.loads((source / "config.json").read_text()), **changes}


def refusal(config: dict[str, Any], transforms: list[Any] = [], **recipe: Any) -> str:  # noqa: B006
    data = {
        "scheme": "test",
        "transforms": transforms,
        "layers": [{"match": ".*", "scheme": "w4a8-lqq", "group_size": 64, "layout": "dual-mma"}],
    }
    with pytest.raises(QtoolError) as caught:
        Job.of(config, recipes.parse(data | recipe, "test"))
    return str(caught.value)


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_of_a_declaration_fit_together(variant: str, make_model: MakeModel) -> None:
    config = config_of(make_model(variant))
    family = family_of(config)
    settings = family.settings(config)
    for block in range(config["num_hidden_layers"]):
        own = family.at(settings, block)
        assert own is family.at(settings, block)
        shapes, linears = own.block_shapes(settings), list(own.linears())
        assert len(linears) == len(set(linears))
        parts = {part for fused in own.fused.values() for part in fused}
        for group in own.groups:
            assert len({shapes[f"{name}.weight"][1] for name in group.linears}) == 1
            assert f"{own.owner(group.source)}.weight" in shapes
            assert group.gate is None or group.gate in parts or f"{group.gate}.weight" in shapes
        for name in parts | {own.attention.q, own.attention.k, own.attention.v}:
            assert f"{own.owner(name)}.weight" in shapes
        for linear, fused in own.fused.items():
            rows = torch.arange(shapes[f"{linear}.weight"][0])
            assert torch.equal(
                torch.cat([rows[own.rows(part, settings)] for part in fused]).sort().values, rows
            )
        for readers in own.readers.values():
            assert not set(readers) & set(linears)


@pytest.mark.parametrize(
    "model_type",
    [t for family in FAMILIES for t in family.model_types if t in CONFIG_MAPPING_NAMES],
)
def test_missing_sizes_are_those_of_the_class(model_type: str) -> None:
    """Published Gemma 3 text configs name neither heads nor vocabulary."""
    settings = family_of({"model_type": model_type}).settings({"model_type": model_type})
    config = CONFIG_MAPPING[model_type]()
    assert all(getattr(settings, key) == getattr(config, key) for key in REQUIRED)


@pytest.mark.parametrize(
    "model_type, what",
    [
        ("t5", "an encoder-decoder"),
        ("whisper", "an encoder-decoder"),
        ("bert", "an encoder;"),
        ("vit", "a vision model"),
        ("sam", "no causal language model"),
        ("lama", "transformers .* does not know it either; .* of a plugin that is not installed"),
    ],
)
def test_an_unsupported_architecture_is_told_what_it_is(model_type: str, what: str) -> None:
    message = refusal({"model_type": model_type})
    assert re.match(f"unsupported architecture '{model_type}': {what}", message)
    assert all(name in message for family in FAMILIES for name in family.model_types)


def test_a_type_that_only_a_plugin_registered_is_derived(monkeypatch: pytest.MonkeyPatch) -> None:
    for mapping in (CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        monkeypatch.setattr(mapping, "_extra_content", {})
    config = type("MineConfig", (LlamaConfig,), {"model_type": "mine"})
    model = type("MineForCausalLM", (LlamaForCausalLM,), {"config_class": config})
    AutoConfig.register("mine", config)
    assert "no causal language model" in refusal({"model_type": "mine"})
    AutoModelForCausalLM.register(config, model)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1}
    family = family_of(config(**sizes, num_attention_heads=2, vocab_size=320))
    assert family.derived and [*family.linears()] == [*LLAMA.linears()]


def test_an_encoder_decoder_is_told_before_it_is_built() -> None:
    """Florence-2 is listed as a multimodal model."""
    assert why_unsupported("florence2").startswith("an encoder-decoder")


def test_types_that_are_named_here_exist() -> None:
    known = set(CONFIG_MAPPING_NAMES)
    assert set(DECODERS) <= known
    assert not known.isdisjoint(t for family in FAMILIES for t in family.model_types)


def test_a_family_from_outside(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that somebody declares elsewhere is quantized by that, not by what is derived."""
    monkeypatch.setattr(models, "FAMILIES", [*FAMILIES])
    monkeypatch.setitem(VARIANTS, "smollm3", {"pad_token_id": 0})
    source = make_model("smollm3")
    assert family_of(Checkpoint(source).config).derived
    smol = replace(LLAMA, name="SmolLM3", model_types=("smollm3",))
    models.register_family(smol)
    models.register_family(smol)
    assert models.FAMILIES.count(smol) == 1
    assert family_of(Checkpoint(source).config) is smol
    out = quantize(Checkpoint(source), recipes.load("w4a16"), tmp_path / "out")
    model, ids = load(out), torch.arange(12)[None]
    expected = dequantized(copy.deepcopy(model))(ids).logits
    assert len(quantized_linears(model)) == 14
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_what_register_family_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "FAMILIES", [*FAMILIES])
    with pytest.raises(QtoolError, match="Llama covers model_type 'mistral' already"):
        models.register_family(replace(LLAMA, model_types=("mine", "mistral")))
    with pytest.raises(QtoolError, match=r"is no qtool\.models\.Family"):
        models.register_family("llama")  # type: ignore[arg-type]
    assert models.FAMILIES == FAMILIES


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_declared_families_name_what_they_declare(family: Family) -> None:
    require_consistent(family)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"model_types": "mine"}, "model_types is 'mine'; tuple.str, .... is expected"),
        (
            {"groups": (LinearGroup((DOWN,), "up", Fold.NORM),)},
            "source names 'up', and tensors has",
        ),
        ({"groups": (LinearGroup((DOWN,), UP, Fold.PRODUCT, gate="g"),)}, "gate names 'g'"),
        ({"groups": (LinearGroup(("up",), "n", Fold.NONE),)}, "groups names 'up', and tensors has"),
        (
            {"groups": (*LLAMA.groups, LLAMA.groups[-1])},
            "family Mine: mlp.down_proj is in two groups",
        ),
        ({"groups": (LinearGroup(DOWN, UP, Fold.PRODUCT),)}, "linears is 'mlp.down_proj'; tuple"),
        (
            {"groups": (LinearGroup((DOWN,), UP, "product"),)},
            "family Mine: LinearGroup: fold is 'product'; Fold is expected",
        ),
        ({"attention": Attention(q="q")}, "attention names 'q', and tensors has no q.weight"),
        ({"kv_cache": KVCache(argument=5)}, "family Mine: KVCache: argument is 5; str is expected"),  # type: ignore[arg-type]
        ({"kv_cache": KVCache("attn")}, "kv_cache names 'attn', and tensors has none of it"),
        (
            {"attention": replace(LLAMA.attention or Attention(), k_norm="kn")},
            "attention names 'kn', and tensors has no kn.weight",
        ),
        (
            {
                "attention": replace(LLAMA.attention or Attention(), k_norm="k_norm"),
                "tensors": {**LLAMA.tensors, "k_norm.weight": "dim"},
            },
            "has k_norm on queries or keys alone, .*: give refuses a reason",
        ),
        ({"readers": {"no_norm": (UP,)}}, "readers names 'no_norm', which no group reads"),
        ({"readers": {"input_layernorm": ("r",)}}, "readers names 'r', and tensors has no r"),
        ({"positions": "wpe"}, "positions is declared, and sizes has no function 'positions'"),
        ({"experts": Experts()}, "experts is declared, and sizes has no function 'experts'"),
        ({"post_norms": ("n",)}, "post_norms names 'n', and tensors has no n.weight"),
        ({"fused": {"qkv": {"q": "hidden"}}}, "fused names 'qkv', and tensors has no qkv.weight"),
        ({"fused": {UP: {"rest": "intr"}}}, "family Mine: the size 'intr' of rest: .* inter"),
        ({"fused": {UP: {"rest": "3²"}}}, "family Mine: the size '3²' of rest: known: .* inter"),
        ({"biased": ("q",)}, "biased names 'q', and tensors has no q.weight"),
        ({"layer_norm": 1}, "layer_norm is 1; bool is expected"),
        ({"norm_offset": None}, "norm_offset is None; float is expected"),
        ({"choose": 5}, "choose is 5; Callable.* None is expected"),
        ({"sizes": {"inter": 5}}, "sizes is .'inter': 5.; Mapping.str, Callable"),
        ({"outside": {"x": (1, "q")}}, "outside is .'x': .1, 'q'..; Mapping.str, tuple.int"),
        (
            {"tensors": {**LLAMA.tensors, "input_layernorm.bias": "hidden"}},
            "tensors has input_layernorm.bias of a norm, and layer_norm is False",
        ),
        ({"tensors": {**LLAMA.tensors, "x.weight": "hiden"}}, "'hiden' of x.weight: .* hidden"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(
    wrong: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "FAMILIES", [*FAMILIES])
    with pytest.raises(QtoolError, match=said):
        models.register_family(replace(LLAMA, **{"name": "Mine", "model_types": ("mine",)} | wrong))


def test_a_norm_on_keys_alone_is_declared_with_what_it_rules_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "FAMILIES", [*FAMILIES])
    mine = replace(
        LLAMA,
        name="Mine",
        model_types=("mine",),
        attention=replace(LLAMA.attention or Attention(), k_norm="k_norm"),
        tensors={**LLAMA.tensors, "k_norm.weight": "dim"},
        refuses={"smooth-attention": "a norm follows its keys alone"},
    )
    models.register_family(mine)
    assert mine in models.FAMILIES


@pytest.mark.parametrize(
    ("family", "parts", "rows"),
    [
        (PHI3, {Q: "q", K: "kv"}, (96, 128)),
        (PHI3, {Q: "q", K: "kv", V: "kv+1"}, (129, 128)),
        (replace(FALCON, choose=None), {Q: "q", K: "kv", V: "q"}, (144, 96)),
    ],
)
def test_parts_of_a_fused_linear_that_do_not_make_it_up_are_refused(
    family: Family, parts: dict[str, str], rows: tuple[int, int]
) -> None:
    linear = next(iter(family.fused))
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 16, "vocab_size": 61}
    heads = {"num_key_value_heads": 2, "multi_query": family is not PHI3}
    settings = SimpleNamespace(**sizes, **heads, intermediate_size=96, num_hidden_layers=1)
    require_sizes(family, settings)
    mine = replace(family, fused={**family.fused, linear: parts})
    with pytest.raises(QtoolError, match=rf"{linear} have {rows[0]} rows .* has {rows[1]}$"):
        require_sizes(mine, settings)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (None, "^Mine: choose gives NoneType; Family is expected$"),
        (replace(LLAMA, post_norms=("n",)), "post_norms names 'n', and tensors has no n.weight"),
    ],
)
def test_families_that_blocks_choose_are_checked_too(chosen: Any, said: str) -> None:
    mine = replace(LLAMA, name="Mine", choose=lambda config, block: chosen if block else LLAMA)
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 61}
    settings = SimpleNamespace(**sizes, intermediate_size=96, num_hidden_layers=2)
    with pytest.raises(QtoolError, match=said):
        require_sizes(mine, settings)


@pytest.mark.parametrize("variant", ["gemma2", "gemma3_text"])
def test_post_norms_cannot_be_rotated_through(variant: str, make_model: MakeModel) -> None:
    config = config_of(make_model(variant))
    assert "post_attention_layernorm acts on what is written" in refusal(
        config, ["norm-fusion", "rotate"]
    )
    Job.of(
        config,
        recipes.parse(
            {
                "scheme": "test",
                "layers": [{"match": ".*", "scheme": None}],
                "transforms": ["norm-fusion", {"rotate": {"residual": False}}],
            },
            "test",
        ),
    )


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"word_embed_proj_dim": 64}, "project_in"),
        ({"do_layer_norm_before": False}, "do_layer_norm_before false"),
        (
            {"layer_norm_elementwise_affine": False},
            "affine false is not supported: its norms have no",
        ),
        ({"_remove_final_layer_norm": True}, "_remove_final_layer_norm true"),
    ],
)
def test_opt_that_is_built_otherwise_is_refused(
    changes: dict[str, Any], reason: str, make_model: MakeModel
) -> None:
    assert reason in refusal(config_of(make_model("opt"), **changes))


def test_a_config_may_leave_out_what_transformers_knows(make_model: MakeModel) -> None:
    config = config_of(make_model("gemma2"))
    del config["tie_word_embeddings"]
    assert Job.of(config, recipes.load("w4a16")).tied


@pytest.mark.parametrize(
    ("variant", "size"),
    [
        ("llama", "intermediate_size"),
        ("mistral", "num_key_value_heads"),
        ("qwen3", "head_dim"),
        ("opt", "ffn_dim"),
    ],
)
def test_a_config_may_leave_out_a_size_that_transformers_knows(
    variant: str, size: str, make_model: MakeModel
) -> None:
    config = config_of(make_model(variant))
    del config[size]
    own = AutoConfig.for_model(**config)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(own).state_dict()
    found = Job.of(config, recipes.load("w8a8")).source_shapes()
    assert found == {name: tuple(expected[name].shape) for name in found}


def test_a_config_may_set_a_size_of_another_family_to_0(make_model: MakeModel) -> None:
    """Qwen3-Coder's does."""
    config = config_of(make_model("qwen3_moe"))
    shapes = Job.of(config, recipes.load("w8a8")).source_shapes()
    config["shared_expert_intermediate_size"] = 0
    assert Job.of(config, recipes.load("w8a8")).source_shapes() == shapes


@pytest.mark.parametrize("variant", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_config_may_leave_out_how_many_experts_a_token_goes_to(
    variant: str, make_model: MakeModel
) -> None:
    config = config_of(make_model(variant))
    del config["num_experts_per_tok"]
    own = AutoConfig.for_model(variant).num_experts_per_tok
    assert family_of(config).settings(config).num_experts_per_tok == own


def test_sizes_may_have_the_keys_that_transformers_class_maps() -> None:
    config = {"model_type": "gpt2", "n_embd": 96, "n_layer": 3, "n_head": 4, "vocab_size": 61}
    settings = replace(LLAMA, model_types=("gpt2",)).settings(config)
    assert (settings.hidden_size, settings.num_hidden_layers) == (96, 3)


def test_groups_that_do_not_divide_leave_a_few_linears_in_16_bit() -> None:
    config = tiny_config("gemma4_text").to_dict()
    job = Job.of(config, recipes.load("w4a16"))
    said = "in 16 bits: per_layer_projection, 64 inputs, which groups of 128 do not divide"
    assert said in job.recipe.adaptations
    assert job.format.of("model.layers.0.per_layer_projection") is None
    assert job.format.of("model.layers.0.mlp.down_proj") is not None
    config["hidden_size_per_layer_input"], config["intermediate_size"] = 128, 192
    with pytest.raises(QtoolError, match=r"mlp.down_proj: w4a16: 192 input channels are not"):
        Job.of(config, recipes.load("w4a16"))


def test_opt_has_the_heads_of_its_hidden_size(make_model: MakeModel) -> None:
    """transformers reads no other sizes of them, whatever a conversion has left in config.json."""
    config = config_of(make_model("opt"), num_key_value_heads=2, head_dim=64)
    assert Heads.of(family_of(config).settings(config)) == Heads(4, 4, 32)
