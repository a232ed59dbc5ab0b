"""Static KV scales from the data, and blocks that see what the quantized cache would give them."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from qtool.calibration.batch import Batch, first_inputs
from qtool.calibration.block import Block
from qtool.calibration.forwards import propagate, run
from qtool.calibration.kv import cache
from qtool.calibration.kv.cache import SEQUENCES, SimulatedKV, kv_constants, quantized_kv
from qtool.calibration.statistics import subset
from qtool.calibration.transforms.queries import (
    LEAST,
    are_made_as_known,
    attending_queries,
    observe_queries,
)
from qtool.calibration.transforms.smooth_attention import observe_keys
from qtool.errors import QtoolError
from qtool.models import Heads, KVCache, family_of
from qtool.models.auto import auto_class
from qtool.models.cache_argument import CACHE
from qtool.runtime.kv_cache import quantize_kv
from qtool.runtime.packed_kv import kv_tensors
from qtool.schemes.kv import KV4
from tests.calibration.conftest import attended
from tests.models.tiny import tiny_config

TOKENS = torch.arange(4 * 64).view(4, 64) * 17 % 61


@torch.no_grad()
def propagated(
    model: PreTrainedModel, kv: str | None
) -> tuple[list[Batch], list[dict[str, Tensor]]]:
    """The last block's outputs when all blocks compute under ``kv``, and each block's tensors."""
    family = family_of(model.config)
    batches, stored = first_inputs(model, family, list(TOKENS.split(2))), []
    for index, module in enumerate(model.get_submodule(family.blocks)):
        block = Block(index, module, family, model.config, {})
        stored.append(kv_constants(block, kv, batches))
        with quantized_kv(block, kv, stored[-1]):
            propagate(block, batches)
    return batches, stored


@pytest.mark.parametrize("kv", [None, "kv8", "kv4", "kv4-channel"])
@torch.no_grad()
def test_blocks_see_what_the_cache_gives(any_model: PreTrainedModel, kv: str | None) -> None:
    seen_as_cached(any_model, kv)


@torch.no_grad()
def test_a_cache_that_the_block_does_not_take_is_refused(any_model: PreTrainedModel) -> None:
    family = family_of(any_model.config)
    wrong = replace(family, kv_cache=KVCache(argument="nonsense"))
    module = any_model.get_submodule(family.blocks)[0]  # type: ignore[index]
    with pytest.raises(QtoolError, match=r"argument is 'nonsense', and the arguments of a block"):
        Block(0, module, wrong, any_model.config, {}).with_cache(None)


@pytest.mark.parametrize("model_type", ["mpt", "moshi"])
@torch.no_grad()
def test_blocks_of_a_derived_family_see_it_too(model_type: str) -> None:
    """MPT's attention calls the cache otherwise than its block; Moshi's linears are wrapped."""
    torch.manual_seed(0)
    config = tiny_config(model_type)
    seen_as_cached(auto_class(config).from_config(config).eval(), "kv8")


def seen_as_cached(model: PreTrainedModel, kv: str | None) -> None:
    exact = model.get_decoder()(TOKENS).last_hidden_state
    batches, stored = propagated(model, kv)
    if kv:
        quantize_kv(model, kv)
    family = family_of(model.config)
    final_norm = model.get_submodule(family.final_norm)
    for module, tensors in zip(model.get_submodule(family.blocks), stored, strict=True):
        for name, scale in tensors.items():
            module.get_buffer(name).copy_(scale)
    for batch, tokens, before in zip(batches, TOKENS.split(2), exact.split(2), strict=True):
        hidden = model.get_decoder()(tokens, use_cache=False).last_hidden_state
        torch.testing.assert_close(final_norm(batch.hidden), hidden, rtol=0, atol=1e-6)
        assert torch.equal(hidden, before) == (kv is None)


@torch.no_grad()
def test_scales_are_the_largest_keys_after_rope_and_values(any_model: PreTrainedModel) -> None:
    _, stored = propagated(any_model, "kv8")
    cache = DynamicCache()
    any_model.get_decoder()(TOKENS, **{CACHE: cache})
    family, heads = family_of(any_model.config), Heads.of(any_model.config)
    assert family.kv_cache is not None
    attention = family.kv_cache.module
    layer, found = cache.layers[0], stored[0]  # later blocks see quantized keys before them
    for name, seen in (("k_scale", layer.keys), ("v_scale", layer.values)):
        # a kv head may come once for each of its query heads
        once = seen[:, :: seen.shape[1] // heads.kv]
        torch.testing.assert_close(
            found[f"{attention}.{name}"] * 127, once.abs().amax((0, 2)), rtol=1e-5, atol=1e-6
        )
    declared = kv_tensors("kv8", family, any_model.config)
    assert {n: (t.shape, t.dtype) for n, t in found.items()} == {
        n: (t.shape, t.dtype) for n, t in declared.items()
    }


def test_kv4_stores_the_mean_of_keys_and_what_queries_read(llama: PreTrainedModel, blocks) -> None:
    block, batches = blocks(llama)[0]
    found = kv_constants(block, "kv4", batches)
    torch.testing.assert_close(found["self_attn.k_offset"], observe_keys(block, batches).mean)
    importance = observe_queries(block, subset(batches, SEQUENCES)).importance()
    torch.testing.assert_close(found["self_attn.k_importance"], importance)
    assert found["self_attn.k_offset"].abs().max() > 0 and not (importance == 1).all()
    nothing = kv_constants(block, "kv4", [])
    assert (nothing["self_attn.k_offset"] == 0).all() and (
        nothing["self_attn.k_importance"] == 1
    ).all()


def derived_blocks(model_type: str, blocks, **sizes: Any) -> list[tuple[Block, list[Batch]]]:
    torch.manual_seed(0)
    config = tiny_config(model_type, **sizes)
    return blocks(auto_class(config).from_config(config).eval())


@pytest.mark.parametrize(
    ("model_type", "number"),
    [
        *(("cohere", 0), ("glm4", 0), ("ernie4_5", 0), ("hunyuan_v1_dense", 0), ("moshi", 0)),
        *(("llama4_text", 0), ("qwen3_5_text", 1), ("gemma4_text", 0), ("gemma4_text", 1)),
    ],
)
@torch.no_grad()
def test_kv4_weighs_keys_by_queries_that_attention_is_given(
    model_type, number, blocks, monkeypatch
) -> None:
    """RoPE turns neighbours, comes before the norm, or takes angles that attention makes itself; or
    the attention is of another form.
    """
    block, batches = derived_blocks(model_type, blocks)[number]
    assert not are_made_as_known(block) and block.family.kv_cache is not None
    name = block.family.kv_cache.tensor("k_importance")
    monkeypatch.setattr(cache, "cache_errors", lambda *_: {"even": 2.0, "weighted": 1.0})
    found = kv_constants(block, "kv4", batches)
    queries, keys = map(torch.cat, attended(block, batches))
    heads, dim = block.family.kv_cache.heads(block.config)
    assert queries.shape[-1] == keys.shape[-1] == dim
    power = queries.unflatten(1, (heads, -1)).square().mean((0, 2, 3))
    expected = power / power.mean(1, keepdim=True)
    torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=LEAST)
    assert found[block.family.kv_cache.tensor("k_offset")].abs().max() > 0
    monkeypatch.setattr(cache, "cache_errors", lambda *_: {"even": 1.0, "weighted": 1.0})
    assert (kv_constants(block, "kv4", batches)[name] == 1).all()


@pytest.mark.parametrize("change", [lambda keys: keys + 1, lambda keys: keys.roll(1, 1)])
@torch.no_grad()
def test_kv4_weighs_no_channel_of_keys_that_are_changed_before_attention(change, blocks) -> None:
    block, batches = derived_blocks("cohere", blocks)[0]
    attention = torch.nn.functional.scaled_dot_product_attention

    def changed(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        return attention(query, change(key), *rest, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", changed)
        assert attending_queries(block, batches) is None
        found = kv_constants(block, "kv4", batches)
    assert (found["self_attn.k_importance"] == 1).all()


@torch.no_grad()
def test_weights_of_keys_are_stored_where_they_lower_the_error(blocks) -> None:
    """Of a query that reads two channels alone, the errors of the others do not count."""
    block, batches = derived_blocks("cohere", blocks)[0]
    weight = block.get("self_attn.q_proj").weight
    weight.view(block.heads.query, block.heads.dim, -1)[:, 2:] = 0
    weight *= 100  # so that scores matter
    found = kv_constants(block, "kv4", batches)
    importance = found["self_attn.k_importance"]
    assert (importance[:, :2] > importance[:, 2:].amax(1, keepdim=True)).all()
    exact = run(block, batches[0])

    def error(weights: Tensor | None) -> Tensor:
        quantized = SimulatedKV(KV4(found["self_attn.k_offset"], weights), KV4())
        return (run(block, batches[0], **block.with_cache(quantized)) - exact).norm()

    assert error(importance) < error(None)


def test_a_block_without_rope_asks_for_earlier_tokens(blocks) -> None:
    """Llama 4 scales queries by their position there."""
    for block, batches in derived_blocks("llama4_text", blocks, no_rope_layers=[1, 0]):
        assert (kv_constants(block, "kv8", batches)["self_attn.k_scale"] > 0).all()


@torch.no_grad()
def test_queries_are_the_same_as_they_are_made_and_as_they_attend(any_model, blocks) -> None:
    for block, batches in blocks(any_model):
        made, attending = observe_queries(block, batches), attending_queries(block, batches)
        if attending is not None:  # some attention is not torch's own
            torch.testing.assert_close(
                attending.importance(), made.importance(), rtol=1e-3, atol=LEAST
            )


def test_the_block_is_restored_and_an_explicit_cache_wins(llama: PreTrainedModel, blocks) -> None:
    block, batches = blocks(llama)[0]
    before = run(block, batches[0])
    own = SimulatedKV(KV4(), KV4())
    with pytest.raises(ZeroDivisionError), quantized_kv(block, "kv4-channel", {}):
        # 16 tokens do not fill a group: all are in 16 bits
        assert torch.equal(run(block, batches[0]), before)
        assert not torch.equal(run(block, batches[0], **block.with_cache(own)), before)
        raise ZeroDivisionError
    assert torch.equal(run(block, batches[0]), before)
    with quantized_kv(block, None, {}):
        assert torch.equal(run(block, batches[0]), before)


@pytest.mark.parametrize(("kv", "tensors"), [("kv8", ["scale"]), ("kv4", ["offset", "importance"])])
def test_constants_are_used_where_the_block_is(
    kv: str, tensors: list[str], llama: PreTrainedModel, blocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are stored on the CPU, which no kernel of a GPU reads."""
    block, batches = blocks(llama)[0]
    stored, seen = kv_constants(block, kv, batches), []
    monkeypatch.setattr(cache, "SimulatedKV", lambda *quantizers: seen.extend(quantizers))
    block.module.to("meta")
    with quantized_kv(block, kv, stored):
        assert all(getattr(seen[0], name).is_meta for name in tensors)


def test_gradients_pass_straight_through(llama: PreTrainedModel, blocks) -> None:
    block, batches = blocks(llama)[0]
    with quantized_kv(block, "kv4", kv_constants(block, "kv4", [])):
        quantized = run(block, batches[0])
        output = block.module(batches[0].hidden, **batches[0].kwargs[0])
        output.square().sum().backward()
    torch.testing.assert_close(output.detach(), quantized)
    assert all(block.get(f"self_attn.{x}_proj").weight.grad.abs().max() > 0 for x in "qkvo")


def test_what_cannot_be_is_refused(llama: PreTrainedModel, blocks) -> None:
    block, batches = blocks(llama)[0]
    assert kv_constants(block, "kv4-channel", batches) == kv_constants(block, None, []) == {}
    with pytest.raises(QtoolError, match="kv8 has static scales: it needs calibration data"):
        kv_constants(block, "kv8", [])
    with pytest.raises(QtoolError, match="unknown --kv 'kv2'"):
        kv_constants(block, "kv2", [])
    batches[0].hidden[0, 0, 0] = float("nan")
    with pytest.raises(QtoolError, match="NaN or Inf"):
        kv_constants(block, "kv8", batches)
    with pytest.raises(QtoolError, match="head dimension of 7 is odd"):
        kv_tensors("kv4", replace(block.family, kv_cache=KVCache(shape=(2, 7))), None)
