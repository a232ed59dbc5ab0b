"""Attention reads the packed cache itself: models whose layers hand it over, by the op's CPU
reference.
"""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from qtool.models.auto import auto_class
from qtool.models.cache_argument import CACHE
from qtool.runtime import kv_attention, kv_cache
from qtool.runtime.kv_attention import attend
from qtool.runtime.kv_cache import QuantCache, quantize_kv
from qtool.runtime.packed_kv import PackedTokens
from qtool.schemes.kv import KV4
from tests.models.tiny import tiny_config
from tests.runtime.test_kv_cache import ids, make_model

NAMES = ("kv4", "kv8")


def reads_here(stored: PackedTokens, new: torch.Tensor) -> bool:
    """Where the kernel could read, were this a GPU."""
    return new.shape[2] <= kv_attention.MOST_QUERIES


@pytest.fixture
def packed_calls() -> Iterator[mock.Mock]:
    """Layers hand over packed tokens on a CPU too; the calls of the packed attention."""
    with (
        mock.patch.object(kv_cache, "kernel_reads", reads_here),
        mock.patch.object(kv_attention, "_packed", wraps=kv_attention._packed) as calls,
    ):
        yield calls


def decode(
    model: Any, tokens: torch.Tensor, cuts: list[int], mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits of ``tokens`` given to ``model`` in parts."""
    cache, seen, parts = QuantCache.of(model), 0, []
    for part in tokens.split(cuts, 1):
        seen += part.shape[1]
        shown = None if mask is None else mask[:, :seen]
        parts.append(model(part, **{CACHE: cache}, attention_mask=shown).logits)
    return torch.cat(parts, 1).float()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("padding", [0, 30])
def test_decoding_packed_is_decoding_dequantized(
    name: str, padding: int, packed_calls: mock.Mock
) -> None:
    model, cuts, mask = (
        make_model(name, torch.bfloat16),
        [70, 1, 1, 4, 1, 1],
        torch.ones(2, 78, dtype=torch.long),
    )
    mask[1, :padding] = 0
    found = decode(model, ids(78), cuts, mask)
    assert packed_calls.call_count == 5 * 2  # every forward but the first, in each of two layers
    assert (packed_calls.call_args.args[3] is None) == (padding == 0)
    with mock.patch.object(kv_cache, "kernel_reads", lambda *_: False):
        expected = decode(model, ids(78), cuts, mask)
    assert packed_calls.call_count == 5 * 2
    assert torch.equal(found[:, :70], expected[:, :70])
    assert (found - expected).norm() < 0.02 * expected.norm()


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_beams_and_guessed_tokens(name: str, packed_calls: mock.Mock) -> None:
    model = make_model(name, torch.bfloat16)
    assert model.generate(ids(24), max_new_tokens=4, num_beams=3, do_sample=False).shape == (2, 28)
    beams = packed_calls.call_count
    assert model.generate(ids(24, batch=1), max_new_tokens=4, prompt_lookup_num_tokens=2).shape == (
        1,
        28,
    )
    assert 0 < beams < packed_calls.call_count


@torch.no_grad()
def test_models_that_are_not_on_sdpa_keep_their_attention(packed_calls: mock.Mock) -> None:
    model = make_model("kv4", torch.bfloat16, attn_implementation="eager")
    assert model.config._attn_implementation == "eager"
    decode(model, ids(9), [8, 1])
    assert not packed_calls.called
    assert make_model("kv4", torch.bfloat16).config._attn_implementation == kv_attention.NAME
    assert "attn" not in make_model("kv4", torch.bfloat16).config.to_json_string().replace(
        "attention", ""
    )


def other_model(model_type: str) -> Any:
    torch.manual_seed(0)
    config = tiny_config(model_type)
    model = auto_class(config).from_config(config, dtype=torch.bfloat16).eval()
    quantize_kv(model, "kv4")
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("model_type", "attentions"),
    [
        *(("qwen3_5_text", 1), ("llama4_text", 2), ("gemma4_text", 4), ("falcon_h1", 2)),
        *(("doge", 0), ("diffllama", 0), ("jetmoe", 0), ("falcon", 0)),
    ],
)
def test_attention_of_any_form_may_read_packed(
    model_type: str, attentions: int, packed_calls: mock.Mock
) -> None:
    """If it gives the cache's keys and values to its attention function alone. Two blocks of the
    Gemma 4 read the keys of others; Doge makes a mask of the values.
    """
    model, cuts = other_model(model_type), [12, 1, 3, 1]
    found = decode(model, ids(17), cuts)
    assert packed_calls.call_count == 3 * attentions
    with mock.patch.object(kv_cache, "kernel_reads", lambda *_: False):
        expected = decode(model, ids(17), cuts)
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_a_layer_learns_by_whom_its_keys_and_values_are_read() -> None:
    query, x = torch.randn(1, 4, 3, 16), torch.randn(1, 4, 3, 16)

    def layer() -> kv_cache.QuantCacheLayer:
        return kv_cache.QuantCacheLayer(KV4(), KV4(), heads=4, attends=True)

    attended, seen = layer(), layer()
    keys, values = attended.update(x, x)
    out, _ = attend(torch.nn.Module(), query, keys, values, None)
    assert type(out) is torch.Tensor and attended.reads.only_to_attend
    assert not any(type(y) is kv_attention.Handed for y in attended.update(x, x))
    keys, values = seen.update(x, x)
    assert type(values * 1) is torch.Tensor
    attend(torch.nn.Module(), query, keys, values, None)
    assert not seen.reads.only_to_attend
    seen.reset()
    assert type(seen.update(x, x)[0]) is kv_attention.Handed
    without = kv_cache.QuantCacheLayer(KV4(), KV4(), heads=4)
    assert type(without.update(x, x)[0]) is torch.Tensor


@torch.no_grad()
def test_what_the_kernel_has_not_is_read_dequantized(packed_calls: mock.Mock) -> None:
    model = make_model("kv4", torch.bfloat16)
    bias = torch.zeros(2, 1, 1, 21, dtype=torch.bfloat16)
    bias[..., 0] = -1e9
    cache = QuantCache.of(model)
    model(ids(20), **{CACHE: cache})
    model(ids(1), **{CACHE: cache}, attention_mask=bias)
    assert not packed_calls.called and cache.get_seq_length() == 21


@pytest.mark.parametrize(
    ("offset", "softcap", "packed"), [(1.0, 30.0, 0), (1.0, None, 1), (None, 30.0, 1)]
)
def test_capped_scores_need_the_keys_offset(
    offset: float | None, softcap: float | None, packed: int
) -> None:
    """The kernel leaves it out: all scores of a query move alike, which a cap would notice."""
    tokens = PackedTokens(KV4(None if offset is None else torch.full((2, 16), offset)))
    tokens.store(torch.randn(1, 2, 64, 16))
    with (
        mock.patch.object(kv_attention, "_packed") as kernel,
        mock.patch.object(kv_attention, "sdpa_attention_forward"),
    ):
        attend(torch.nn.Module(), torch.randn(1, 4, 1, 16), tokens, tokens, None, softcap=softcap)
    assert kernel.call_count == packed
