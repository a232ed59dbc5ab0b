"""A derived family is what a declaration by hand says, for every variant that is declared."""

import json
from collections.abc import Callable
from dataclasses import replace
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.models import Family, Heads, KVCache, family_of
from qtool.models.cache_argument import CACHE
from qtool.models.derived import _derived, cached, derive
from qtool.models.derived.attention import LOOK_INTO_CACHE
from qtool.models.derived.facts import STREAM, Kind
from qtool.models.derived.recorder import Recorder
from qtool.models.parts import LinearGroup
from qtool.runtime.packed_kv import kv_tensors
from tests.conftest import VARIANTS, MakeModel, needs_class, needs_transformers
from tests.models.tiny import tiny_config


def facts(family: Family, settings: Any) -> dict[str, Any]:
    """What a family says of a block, with a fused linear's parts called by their places."""
    parts = {
        part: f"{owner}[{number}]"
        for owner, names in family.fused.items()
        for number, part in enumerate(names)
    }

    def called(group: LinearGroup) -> LinearGroup:
        gate = group.gate and parts.get(group.gate, group.gate)
        return replace(group, source=parts.get(group.source, group.source), gate=gate)

    attention = family.attention
    assert attention is not None and family.kv_cache is not None
    qkv = [parts.get(name, name) for name in (attention.q, attention.k, attention.v)]
    return {
        "groups": {called(group) for group in family.groups},
        "linears": sorted(family.linears()),  # parallel branches have no order
        "attention": (qkv, attention.o, attention.q_norm, attention.k_norm),
        "rotary": attention.rotary,
        "cache": (
            family.kv_cache.module,
            family.kv_cache.argument,
            family.kv_cache.heads(settings),
        ),
        "shapes": family.block_shapes(settings),
        "fused": {
            owner: [family.rows(part, settings) for part in names]
            for owner, names in family.fused.items()
        },
        "readers": {norm: set(names) for norm, names in family.readers.items()},
        "post_norms": family.post_norms,
        "fixed": family.why_fixed,
        "offset": family.norm_offset,
        "layer_norm": family.layer_norm,
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_derived_family_is_the_declared_one(variant: str, make_model: MakeModel) -> None:
    config = json.loads((make_model(variant) / "config.json").read_text())
    declared, derived = family_of(config), derive(config)
    assert not declared.derived and derived.derived
    for part in ("embedding", "positions", "blocks", "final_norm", "head", "returns"):
        assert getattr(derived, part) == getattr(declared, part), part
    settings = declared.settings(config)
    for block in range(config["num_hidden_layers"]):
        ours = facts(derived.at(derived.settings(config), block), settings)
        theirs = facts(declared.at(settings, block), settings)
        if config.get("alibi"):  # declared for all Falcons, of which some have no RoPE
            ours.pop("rotary"), theirs.pop("rotary")
        assert ours == theirs
    assert not derived.streamed_only and not derived.refuses and not derived.outside


@pytest.mark.parametrize("model_type", ["olmo2", "gpt_neox"])
def test_a_model_that_is_loaded_in_16_bits_has_the_same_family(model_type: str) -> None:
    config = tiny_config(model_type).to_dict()
    _derived.cache_clear()
    torch.set_default_dtype(torch.bfloat16)  # as transformers does while it loads
    try:
        loading = derive(config)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)
        _derived.cache_clear()
    assert repr(loading) == repr(derive(config))  # sizes are functions


@pytest.mark.parametrize("model_type", ["gpt_bigcode", "gptj", "olmo2", "phimoe", "starcoder2"])
def test_what_a_config_leaves_out_is_as_its_class_has_it(model_type: str) -> None:
    """GPT-BigCode's one kv head, for example."""
    config = tiny_config(model_type)
    whole, default = config.to_dict(), type(config)().to_dict()
    short = {k: v for k, v in whole.items() if k == "model_type" or v != default.get(k, ...)}
    assert len(short) < len(whole)
    heads = [Heads.of(derive(given).settings(given)) for given in (whole, short)]
    assert heads[0] == heads[1]


@pytest.mark.parametrize(
    ("model_type", "linear"),
    [
        ("jetmoe", "self_attention.kv_proj"),
        pytest.param("qwen4_exp_text", "mlp.experts.*.down_proj", marks=needs_transformers("5.24")),
    ],
)
def test_a_forward_may_look_at_numbers(model_type: str, linear: str) -> None:
    """JetMoE splits its tokens by how many each expert has, Qwen4's indexer by what it found."""
    family = family_of(tiny_config(model_type).to_dict())
    assert linear in family.linears()
    assert not family.streamed_only


def test_transformers_sees_no_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("transformers.modeling_utils.logger.warning_once", said.append)
    assert family_of(tiny_config("gpt2", pad_token_id=0)) and not said


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        pytest.param(
            "dory", "a block gives it keys and values more than once", marks=needs_class("dory")
        ),
        ("deepseek_v3", "engines cache the latent of its attention, not keys and values"),
        ("minimax", "its forward takes no KV cache of transformers' common kind"),
    ],
)
def test_a_quantized_cache_is_refused_where_a_block_keeps_something_else(
    model_type: str, reason: str
) -> None:
    refuses = family_of(tiny_config(model_type).to_dict()).refuses
    assert [refuses[method] for method in LOOK_INTO_CACHE] == 3 * [reason]


@needs_class("mimo_v2_flash")
def test_a_quantized_cache_is_refused_where_keys_and_values_differ_in_shape() -> None:
    config = tiny_config("mimo_v2_flash", head_dim=64, v_head_dim=32).to_dict()
    assert "both should be [1, heads, 4, head size]" in family_of(config).refuses["kv"]


@needs_class("glm4_moe_lite")
def test_an_output_projection_in_16_bits_says_why_the_residual_stream_stays() -> None:
    config = tiny_config("glm4_moe_lite", v_head_dim=24).to_dict()  # 96 inputs are no groups of 64
    family = family_of(config)
    assert family.why_fixed == "self_attn.o_proj writes to it, and is not quantized"


def test_a_quantized_cache_is_refused_where_transformers_layer_is_unknown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cached, "LAYERS", ())
    config = tiny_config("smollm3", vocab_size=97).to_dict()  # no other test has derived its family
    reason = "its blocks keep more than keys and values in the cache"
    assert [family_of(config).refuses[method] for method in LOOK_INTO_CACHE] == 3 * [reason]


@pytest.mark.parametrize(
    ("model_type", "shapes"),
    [
        ("nemotron_h", [None, (2, 32), None]),  # Mamba, attention, experts alone
        ("gemma4_text", [(2, 32), (2, 64), None, None]),  # the last ones read keys of the first
        ("nanochat", [(2, 32), (2, 32)]),  # attention of another form than the common one
    ],
)
def test_each_block_says_what_it_gives_to_its_cache(
    model_type: str, shapes: list[tuple[int, int] | None]
) -> None:
    family = family_of(tiny_config(model_type).to_dict())
    caches = [family.at(SimpleNamespace(), block).kv_cache for block in range(len(shapes))]
    assert [cache and cache.shape for cache in caches] == shapes
    assert "kv" not in family.refuses


def test_a_model_that_another_thread_runs_is_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward begins while a block of the derived model gives keys and values to its cache."""
    begun, given, update = Event(), Event(), cached._Notes.update

    class Waits(nn.Module):
        def forward(self) -> None:
            begun.set()
            assert given.wait(60)

    def update_beside(notes: Any, *args: Any, **kwargs: Any) -> Any:
        begun.clear()
        given.clear()
        other = Thread(target=Waits())
        other.start()
        assert begun.wait(60)
        found = update(notes, *args, **kwargs)
        given.set()
        other.join()
        return found

    monkeypatch.setattr(cached._Notes, "update", update_beside)
    config = tiny_config("smollm3", vocab_size=99).to_dict()  # no other test has derived its family
    assert family_of(config).kv_cache == KVCache("self_attn", CACHE, (2, 32))


@pytest.mark.parametrize("model_type", ["bert-generation", "git"])
def test_a_quantized_cache_is_refused_where_no_model_holds_the_blocks(model_type: str) -> None:
    """What holds them is a module without a config."""
    family = family_of(tiny_config(model_type).to_dict())
    assert family.refuses["kv"] == "what holds its blocks is no model, which is given a cache"


def test_a_quantized_cache_is_refused_where_its_tensors_would_take_a_name_that_is_in_use() -> None:
    """MiMo-V2 multiplies values by a number of its config, ``v_scale``."""
    family = family_of(tiny_config("mimo_v2_flash").to_dict())
    assert family.refuses["kv"] == "its self_attn has a v_scale of another meaning"


def test_an_output_projection_in_16_bits_says_why_keys_are_not_smoothed() -> None:
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32}
    family = family_of(tiny_config("seed_oss", **heads).to_dict())
    said = "self_attn.o_proj, which reads its heads, stays in 16 bits: 96 inputs, which groups of"
    assert family.refuses.keys() == {"smooth-attention", "value-basis"}
    assert all(reason.startswith(said) for reason in family.refuses.values())
    assert family.kv_cache == KVCache("self_attn", CACHE, (3, 32))


def test_a_quantized_cache_is_refused_where_there_is_none() -> None:
    config = tiny_config("openai-gpt").to_dict()
    with pytest.raises(QtoolError, match=r"kv4-channel: .*none of its blocks keeps keys and val"):
        kv_tensors("kv4-channel", family_of(config), None)


@pytest.mark.parametrize("model_type", ["mamba2", "granitemoehybrid"])
def test_the_chunks_of_a_scan_take_no_memory(model_type: str) -> None:
    """A chunk of 65536 tokens squared, by heads, is more than any machine holds."""
    sizes = {"chunk_size": 1 << 16, "mamba_chunk_size": 1 << 16}
    small, large = (derive(tiny_config(model_type, **own).to_dict()) for own in ({}, sizes))
    assert small.groups and small.groups == large.groups
    assert small.tensors == large.tensors and small.unquantized == large.unquantized


@needs_class("dots3_note_text")
def test_a_linear_stays_whose_weight_is_asked_for_its_dtype() -> None:
    """By the indexer of dots.3: a packed linear could not tell."""
    kept = family_of(tiny_config("dots3_note_text").to_dict()).unquantized
    assert kept["self_attn.indexer.weights_proj"] == "its weight is read outside its own forward"


@pytest.mark.parametrize(
    ("model_type", "said"),
    [
        ("shieldgemma2", r"transformers saves .*embed_tokens.weight of Gemma3.* finds no place"),
        ("longcat_flash", r"mlp.experts has 4 in down_proj and 6 in gate_up_proj: transformers"),
    ],
)
def test_what_transformers_does_not_load_as_it_is_stored(model_type: str, said: str) -> None:
    with pytest.raises(QtoolError, match=said):
        derive(tiny_config(model_type).to_dict())


@needs_class("diffusion_gemma")
def test_a_forward_that_draws_random_numbers_is_refused() -> None:
    """Text diffusion begins at random tokens."""
    with pytest.raises(QtoolError, match="it draws random numbers"):
        derive(tiny_config("diffusion_gemma").to_dict())


def test_a_config_that_does_not_say_where_its_blocks_are() -> None:
    """MusicGen has two text models, BLT four stacks of blocks."""
    parts = {"text_encoder": "t5", "audio_encoder": "encodec", "decoder": "musicgen_decoder"}
    config = {name: {"model_type": part} for name, part in parts.items()}
    with pytest.raises(QtoolError, match="an encoder-decoder"):
        derive({"model_type": "musicgen", **config})
    with pytest.raises(QtoolError, match="the config of BltForCausalLM has no num_hidden_layers"):
        derive(tiny_config("blt").to_dict())


@pytest.mark.parametrize("model_type", ["emu3", "idefics2", "janus"])
def test_blocks_are_the_list_that_is_nearest_to_the_embedding(model_type: str) -> None:
    """Not what has as many, a resampler or a tokenizer of images."""
    config = tiny_config(model_type)
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = 3, None
    blocks = derive(config.to_dict()).blocks
    assert blocks.endswith(".layers") and ("text_model" in blocks or "language_model" in blocks)


def test_the_final_norm_is_none_of_a_block_whose_norm_gives_the_residual_stream() -> None:
    family = derive(tiny_config("minimax").to_dict())
    assert family.final_norm == "model.norm" and not family.outside


@needs_class("muse_spark")
def test_experts_of_another_form_than_is_known_stay() -> None:
    """Muse Spark norms each expert's output; its stacks are looked into, whatever their dtype."""
    family = family_of(tiny_config("muse_spark").to_dict())
    assert "self_attn.q_proj" in family.linears() and not family.experts


@needs_class("doge")
def test_a_dense_config_may_name_experts_that_its_model_does_not_have() -> None:
    config = tiny_config("doge")
    config.num_experts = type(config)().num_experts  # as any config.json of Doge has it
    assert derive(config.to_dict()).groups == derive(tiny_config("doge").to_dict()).groups


@pytest.mark.parametrize("key", ["num_hidden_layers", "num_experts"])
def test_no_model_of_a_damaged_config_is_built(key: str) -> None:
    with pytest.raises(QtoolError, match=f"config.json: {key} is 1000000000; at most"):
        derive({"model_type": "olmoe", key: 10**9})


@pytest.mark.parametrize(
    ("model_type", "settings", "multipliers"),
    [
        ("llama", {}, {1.0}),
        ("granite", {"residual_multiplier": 0.25, "embedding_multiplier": 12.0}, {0.25}),
        ("granitemoehybrid", {"residual_multiplier": 0.25}, {0.25}),
        ("minicpm3", {"scale_depth": 2.0, "num_hidden_layers": 4}, {1.0}),
        ("minicpm3", {"scale_depth": 3.0, "num_hidden_layers": 4}, {1.5}),
        (
            "falcon_h1",
            {
                "ssm_out_multiplier": 0.5,
                "attention_out_multiplier": 0.25,
                "mlp_multipliers": [2.0, 0.75],
            },
            {0.5, 0.25, 0.75},
        ),
    ],
)
def test_what_a_block_adds_is_multiplied_by_the_number_that_its_config_says(
    model_type: str, settings: dict[str, Any], multipliers: set[float]
) -> None:
    config = tiny_config(model_type, **settings)
    family = derive(config.to_dict())
    blocks = (
        family.at(family.settings(config.to_dict()), i) for i in range(config.num_hidden_layers)
    )
    found = {g.multiplier for block in blocks for g in block.groups if g.writes_residual}
    assert found == multipliers


@pytest.mark.parametrize(
    ("written", "factor"),
    [
        (lambda stream, x: stream + x / 4, 0.25),
        (lambda stream, x: stream - x, -1.0),
        (lambda stream, x: torch.rsub(x, stream), -1.0),
        (lambda stream, x: torch.add(stream, x, alpha=0.5), None),
        (lambda stream, x: stream + torch.div(x, 2, rounding_mode="floor"), None),
    ],
)
def test_what_is_added_has_a_factor_only_if_an_operation_says_so(
    written: Callable[[Tensor, Tensor], Tensor], factor: float | None
) -> None:
    recorder, (stream, x) = Recorder(nn.Module()), torch.zeros(2, 1, 4, 8)
    recorder.produce(STREAM, stream)
    recorder.produce("down.weight", x)
    with recorder:
        written(stream, x)
    found = [facts["down.weight"] for _, facts in recorder.trace.writers if facts]
    proved = [fact.factor for fact in found if fact.kind < Kind.MIXED]
    assert proved == ([] if factor is None else [factor])
