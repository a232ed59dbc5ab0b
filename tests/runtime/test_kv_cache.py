"""Models with a quantized KV cache: prefill and decode, generation, checkpoints, forwards that leak
nothing.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    FalconConfig,
    LlamaConfig,
    PreTrainedModel,
    StaticCache,
)
from transformers.cache_utils import Cache, LinearAttentionLayer

from qtool.errors import QtoolError
from qtool.format import CheckpointFormat, LinearFormat, Rule
from qtool.models import Heads
from qtool.models.cache_argument import CACHE
from qtool.pipeline.verify import verify
from qtool.runtime.huggingface import replace_linears
from qtool.runtime.kv_cache import (
    QuantCache,
    QuantCacheLayer,
    quantize_kv,
    quantized_decoder,
    unquantize_kv,
)
from qtool.runtime.load import load
from qtool.runtime.packed_kv import PackedTokens
from qtool.schemes.kv import KV4
from tests.conftest import needs_transformers
from tests.models.tiny import tiny_config

HEADS, DIM, LAYERS, CONTEXT = 2, 16, 2, 256
NAMES = ("kv8", "kv4", "kv4-channel")


def make_model(
    kv: str | None, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=DIM,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **changes,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if kv:
        quantize_kv(model, kv)
    for name, buffer in model.named_buffers():
        if name.endswith(("k_scale", "v_scale")):
            buffer.copy_(torch.rand_like(buffer) * 0.02 + 0.05)
        if name.endswith("k_offset"):
            buffer.copy_(torch.randn_like(buffer))
    return model


def ids(count: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, 61, (batch, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_and_decode_equal_one_forward(name: str, dtype: torch.dtype) -> None:
    model, tokens_in = make_model(name, dtype), ids(96)
    with torch.no_grad():
        full = model(tokens_in, use_cache=False).logits
        cache = QuantCache.of(model)
        # a group is read in 16 bits till full
        cuts = (64, 32) if name == "kv4-channel" else (50, *[1] * 14, 32)
        parts = [model(p, **{CACHE: cache}).logits for p in tokens_in.split(list(cuts), 1)]
    # sums in another order move a few codes by one step
    close = {torch.float32: 5e-3, torch.bfloat16: 0.1}[dtype]
    assert (torch.cat(parts, 1) - full).norm() < close * full.norm()
    assert cache.get_seq_length() == 96


@pytest.mark.parametrize("name", ["kv8", "kv4"])
def test_generation_without_a_cache_reads_all_tokens_again(name: str) -> None:
    model, prompt = make_model(name), ids(9)
    assert getattr(model(prompt, use_cache=False), CACHE) is None
    cached, uncached = (
        model.generate(prompt, max_new_tokens=6, do_sample=False, use_cache=c)
        for c in (True, False)
    )
    assert torch.equal(cached, uncached)


def test_a_wrapper_generates_without_a_cache() -> None:
    """It copies the items of its text model's output."""
    model = AutoModelForImageTextToText.from_config(tiny_config("gemma3")).eval()
    quantize_kv(model, "kv4")
    assert getattr(model(ids(9), use_cache=False), CACHE) is None


def test_repeated_heads_come_back_as_they_came() -> None:
    x = torch.randn(1, HEADS, 5, DIM, generator=torch.Generator().manual_seed(0))
    keys, values = x.repeat_interleave(3, 1), -x.repeat_interleave(3, 1)
    found = QuantCacheLayer(KV4(), KV4(), heads=HEADS).update(keys, values)
    for seen, given in zip(found, (keys, values), strict=True):
        assert (seen - given).norm() < 0.15 * given.norm()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "shape",
    [
        {"multi_query": True},
        {"multi_query": False, "alibi": True, "bias": True},
        {"new_decoder_architecture": True, "num_kv_heads": HEADS},
    ],
)
def test_falcon_keeps_a_kv_head_once_however_often_its_attention_repeats_it(
    name: str, shape: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    config = FalconConfig(
        vocab_size=61, hidden_size=64, num_hidden_layers=LAYERS, num_attention_heads=4, **shape
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    quantize_kv(model, name)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith(("k_scale", "v_scale")):
            buffer.copy_(torch.rand_like(buffer) * 0.02 + 0.05)
    with torch.no_grad():
        full, cache = model(ids(96), use_cache=False).logits, QuantCache.of(model)
        parts = [model(p, **{CACHE: cache}).logits for p in ids(96).split([64, 32], 1)]
    assert (torch.cat(parts, 1) - full).norm() < 5e-3 * full.norm()
    kept = [stored.read().shape for layer in cache.layers for stored in layer.stored]
    heads = Heads.of(config)
    assert kept == 2 * LAYERS * [(2, heads.kv, 96, heads.dim)]
    assert model.generate(ids(8), max_new_tokens=4, do_sample=False, pad_token_id=0).shape == (
        2,
        12,
    )  # type: ignore[operator]


@pytest.mark.parametrize("name", NAMES)
def test_every_forward_is_quantized_and_none_leaks_into_the_next(name: str) -> None:
    model, plain = make_model(name), make_model(None)
    with torch.no_grad():
        first = model(ids(64), use_cache=False).logits
        assert not torch.allclose(first, plain(ids(64)).logits, atol=1e-4)
        model(ids(64, seed=1))
        for again in (
            model(ids(64)),
            model(ids(64), use_cache=True),
            model(ids(64), **{CACHE: DynamicCache()}),
        ):
            assert torch.equal(again.logits, first)
        assert torch.equal(
            model.model(ids(64), None, None, None).last_hidden_state, model.model(ids(64))[0]
        )
        assert getattr(again, CACHE).get_seq_length() == 64
        filled = DynamicCache()
        plain(ids(8), **{CACHE: filled})
        for other in (filled, StaticCache(model.config, max_cache_len=64)):
            with pytest.raises(
                QtoolError, match=f"KV cache is {name}, but it was given a filled or static"
            ):
                model(ids(4), **{CACHE: other})
            with pytest.raises(QtoolError, match=f"KV cache is {name}"):
                model.model(ids(4), past_key_values=other)  # the name that newer models take too


@pytest.mark.parametrize("name", NAMES)
def test_generate_uses_the_cache(name: str) -> None:
    model, cache = make_model(name), QuantCache.of(make_model(name))
    greedy = model.generate(ids(70), max_new_tokens=6, do_sample=False)
    assert torch.equal(
        model.generate(ids(70), max_new_tokens=6, **{CACHE: cache}, do_sample=False), greedy
    )
    assert cache.get_seq_length() == 75
    found = model.generate(ids(70), max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    assert all(isinstance(layer, QuantCacheLayer) for layer in getattr(found, CACHE).layers)
    assert model.generate(ids(70), max_new_tokens=4, num_beams=3, do_sample=False).shape == (2, 74)
    assisted = {"max_new_tokens": 4, "prompt_lookup_num_tokens": 2}
    if name == "kv4-channel" and CACHE == "cache":
        with pytest.raises(ValueError, match="cropped"):
            model.generate(ids(9, batch=1), **assisted)
    else:
        assert model.generate(ids(9, batch=1), **assisted).shape == (1, 13)
    without = model.generate(ids(70), max_new_tokens=2, do_sample=False, use_cache=False)
    assert torch.equal(without[:, :71], greedy[:, :71])


@pytest.mark.parametrize("name", ["kv8", "kv4"])
def test_left_padding_changes_nothing(name: str) -> None:
    model, long, short = make_model(name), ids(24, batch=1), ids(15, batch=1, seed=1)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 9, dtype=torch.long), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :9] = 0
    both = model.generate(batch, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row, prompt in zip(both, (long, short), strict=True):
        assert torch.equal(
            row[24:],
            model.generate(prompt, max_new_tokens=8, do_sample=False)[0, prompt.shape[1] :],
        )


def save(model: PreTrainedModel, kv: str, directory: Path) -> Path:
    """A native checkpoint whose linears are all in 16 bits."""
    model.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = CheckpointFormat("w8a8", (), kv=kv).to_dict()
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_brings_its_cache_and_scales(name: str, tmp_path: Path) -> None:
    model = make_model(name, torch.bfloat16)
    directory = save(model, name, tmp_path / "saved")
    with torch.no_grad():
        expected = model(ids(70)).logits
        for loaded in (
            load(directory),
            AutoModelForCausalLM.from_pretrained(directory),
            load(directory, kv=name),
        ):
            assert torch.equal(loaded(ids(70), use_cache=False).logits, expected)
        if name == "kv8":
            scale = load(directory, dtype=torch.float16).get_buffer(
                "model.layers.1.self_attn.k_scale"
            )
            assert torch.equal(scale, model.get_buffer("model.layers.1.self_attn.k_scale"))
            assert scale.dtype == torch.float32 and scale.shape == (HEADS, DIM)
        other = load(directory, kv="kv4-channel")
        assert torch.equal(other(ids(70)).logits, expected) == (name == "kv4-channel")


@pytest.mark.parametrize("tensor", ["k_offset", "k_importance"])
def test_kv4_quantizes_by_the_tensors_that_are_stored(tensor: str) -> None:
    model = make_model("kv4", torch.bfloat16)
    with torch.no_grad():
        neutral = model(ids(70)).logits
        model.get_buffer(f"model.layers.0.self_attn.{tensor}")[:, ::2] += 10
        assert not torch.equal(model(ids(70)).logits, neutral)


@pytest.mark.parametrize("missing", ["k_offset", "k_importance"])
def test_a_kv4_checkpoint_without_one_of_its_tensors_is_refused(
    missing: str, tmp_path: Path
) -> None:
    directory = save(make_model("kv4"), "kv4", tmp_path / "damaged")
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(missing)}
    assert len(tensors) == len(kept) + LAYERS
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    name = f"model.layers.0.self_attn.{missing}"
    with pytest.raises(QtoolError, match=rf"tensor {name} is missing \({LAYERS} in all\)"):
        load(directory)
    assert name in {row.name for row in verify(directory) if row.problem}


def test_missing_and_damaged_scales_are_refused(tmp_path: Path) -> None:
    directory = save(make_model(None), "kv8", tmp_path / "without")
    with pytest.raises(QtoolError, match=r"self_attn\.[kv]_scale.* is missing"):
        load(directory)
    with pytest.raises(QtoolError, match="kv8 needs calibrated scales"):
        load(save(make_model("kv4"), "kv4", tmp_path / "dynamic"), kv="kv8")
    damaged = make_model("kv8")
    damaged.get_buffer("model.layers.0.self_attn.v_scale")[0, 3] = float("nan")
    with pytest.raises(QtoolError, match=r"layers.0.self_attn.v_scale"):
        load(save(damaged, "kv8", tmp_path / "damaged"))
    with pytest.raises(QtoolError, match="did you mean kv4"):
        quantize_kv(make_model(None), "kv44")


def test_attention_that_has_no_parameters_left() -> None:
    """All four linears packed, no biases: what `qtool eval --kv kv4` meets."""
    model = make_model(None)
    replace_linears(
        model, CheckpointFormat("all", (Rule(".*", LinearFormat("w4a8-qoq", None, "row-major")),))
    )
    quantize_kv(model, "kv4")
    assert len([name for name, _ in model.named_buffers() if name.endswith("k_offset")]) == LAYERS


def test_the_cache_of_a_text_model_that_is_no_architecture_of_its_own() -> None:
    """transformers has no causal model of the type ``qwen2_5_vl_text`` alone."""
    model = AutoModelForImageTextToText.from_config(tiny_config("qwen2_5_vl")).eval()
    quantize_kv(model, "kv4")
    with torch.no_grad():
        cache = model(ids(9)).past_key_values
    assert isinstance(cache, QuantCache) and cache.get_seq_length() == 9


def test_a_model_may_count_what_a_layer_keeps() -> None:
    """Mllama asks so whether a layer has the keys of a picture."""
    model = AutoModelForImageTextToText.from_config(tiny_config("mllama")).eval()
    quantize_kv(model, "kv4")
    with torch.no_grad():
        full, cache = model(ids(9)).logits, QuantCache.of(model)
        parts = [model(part, **{CACHE: cache}).logits for part in ids(9).split([6, 1, 1, 1], 1)]
    assert (torch.cat(parts, 1) - full).norm() < 5e-3 * full.norm()


@pytest.mark.parametrize("kind", ["llama4_text", "modernbert-decoder"])
def test_what_holds_the_blocks_is_given_the_cache(kind: str) -> None:
    """transformers' ``get_decoder()`` gives the head, or the whole model."""
    model = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    quantize_kv(model, "kv4")
    assert quantized_decoder(model) is not model.get_decoder()
    with torch.no_grad():
        full, cache = model(ids(9)).logits, QuantCache.of(model)
        parts = [model(part, **{CACHE: cache}).logits for part in ids(9).split([6, 1, 1, 1], 1)]
    assert (torch.cat(parts, 1) - full).norm() < 5e-3 * full.norm()
    assert cache.get_seq_length() == 9
    unquantize_kv(model)
    assert quantized_decoder(model) is None


@pytest.mark.parametrize("kind", ["deepseek_v3", "mamba"])
def test_a_model_that_caches_no_keys_and_values_has_no_quantized_cache(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(tiny_config(kind))
    with pytest.raises(QtoolError, match="cannot have a quantized KV cache"):
        quantize_kv(model, "kv4")


#: with convolutions, Gated DeltaNet, Mamba, Mamba-2, the last beside attention in a block too, and
#: an indexer
HYBRIDS = (
    *("lfm2", "qwen3_next", "jamba", "granitemoehybrid", "falcon_h1", "zamba2"),
    pytest.param("qwen4_exp_text", marks=needs_transformers("5.24")),
)


def make_hybrid(kind: str, kv: str | None) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    if kv:
        quantize_kv(model, kv)
    return model


class Unquantized(PackedTokens):
    """Keeps keys or values as they come."""

    def store(self, x: torch.Tensor) -> None:
        self.rest = x if self.rest is None else torch.cat([self.rest, x], 2)


@pytest.mark.parametrize("kind", HYBRIDS)
@torch.no_grad()
def test_the_states_of_recurrent_blocks_stay_as_they_are(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that rounds nothing is transformers' own, bit for bit."""
    monkeypatch.setattr("qtool.runtime.kv_cache.PackedTokens", Unquantized)
    ours, theirs = make_hybrid(kind, "kv4"), make_hybrid(kind, None)
    theirs.config._attn_implementation = ours.config._attn_implementation
    cache, expected = QuantCache.of(ours), DynamicCache(config=theirs.config)
    for part in ids(12).split([7, 1, 1, 1, 1, 1], 1):
        logits = ours(part, use_cache=True, **{CACHE: cache}).logits
        assert torch.equal(logits, theirs(part, use_cache=True, **{CACHE: expected}).logits)
    kept, own = states(cache), states(expected)
    assert own and all(map(torch.equal, kept, own)) and len(kept) == len(own)
    cache.reset()
    again = ours(part, use_cache=True, **{CACHE: cache}).logits
    assert torch.equal(again, ours(part, use_cache=False).logits)


def states(cache: Cache) -> list[torch.Tensor]:
    """The states of recurrent layers."""
    kept = [vars(layer) for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    of_both = [(layer["conv_states"], layer["recurrent_states"]) for layer in kept]
    return [x for x in tree_leaves(of_both) if torch.is_tensor(x)]


@pytest.mark.parametrize("kind", HYBRIDS)
def test_a_hybrid_generates_in_batches_and_after_padding(kind: str) -> None:
    model, long, short = make_hybrid(kind, "kv4"), ids(12, batch=1), ids(7, batch=1, seed=1)
    batch = torch.cat([long, torch.cat([torch.zeros(1, 5, dtype=torch.long), short], 1)])
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    both = model.generate(batch, attention_mask=mask, **how)
    for row, prompt in zip(both, (long, short), strict=True):
        assert torch.equal(row[12:], model.generate(prompt, **how)[0, prompt.shape[1] :])
    assert torch.equal(both, model.generate(batch, attention_mask=mask, use_cache=False, **how))
    assert model.generate(long, num_beams=3, **how).shape == (1, 17)


def test_a_hybrid_forgets_the_tokens_that_a_guess_got_wrong() -> None:
    """transformers tells the states that they will be cropped before the first forward."""
    model, how = make_hybrid("lfm2", "kv4"), {"max_new_tokens": 12, "do_sample": False}
    prompt = ids(6, batch=1).repeat(1, 3)
    expected = model.generate(prompt, eos_token_id=None, **how)
    guessed = model.generate(prompt, eos_token_id=None, prompt_lookup_num_tokens=3, **how)
    assert torch.equal(guessed, expected)


@pytest.mark.parametrize("kind", ["gemma4_text", "afmoe"])
@torch.no_grad()
def test_blocks_of_a_window_and_of_all_tokens_have_one_cache(kind: str) -> None:
    """40 tokens, where some blocks look back over 16 alone."""
    model = make_hybrid(kind, "kv8")
    for name, scale in model.named_buffers():
        if name.endswith(("k_scale", "v_scale")):
            scale.fill_(0.05)
    full, cache = model(ids(40)).logits, QuantCache.of(model)
    assert "sliding_attention" in model.config.layer_types
    parts = [model(part, **{CACHE: cache}).logits for part in ids(40).split([30, *[1] * 10], 1)]
    assert (torch.cat(parts, 1) - full).norm() < 5e-3 * full.norm()


@pytest.mark.parametrize("kv", ["kv8", "kv4"])
def test_a_cast_leaves_what_is_stored_as_it_is(kv: str) -> None:
    """Scales of packed linears and of the cache are the checkpoint's; biases and norms follow."""
    model = make_model(None)
    linears = LinearFormat("w4a8-qoq", None, "row-major", "float32")
    replace_linears(model, CheckpointFormat("all", (Rule("mlp", linears),)))
    quantize_kv(model, kv)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.1, 1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    stored = ("s1", "zero", "qweight", "k_scale", "v_scale", "k_offset", "k_importance")
    for name, tensor in model.to(torch.bfloat16).state_dict().items():
        kept = name.rpartition(".")[2] in stored
        expected = before[name] if kept else before[name].bfloat16()
        assert tensor.dtype == expected.dtype and torch.equal(tensor, expected), name
