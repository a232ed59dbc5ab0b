"""A quantized KV cache of decoders of which only some blocks keep keys and values."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache

import qtool
from qtool.errors import QtoolError
from qtool.eval.kv_error import kv_errors
from qtool.io.source import Checkpoint
from qtool.models.cache_argument import CACHE
from qtool.report import build, page
from qtool.runtime.kv_cache import QuantCache, unquantize_kv
from qtool.runtime.packed_kv import NEUTRAL, SCALES, kv_quantizers
from tests.conftest import copy_tokenizer, needs_transformers
from tests.models import proof
from tests.models.tiny import save_tiny

#: with convolutions, Gated DeltaNet twice, Mamba, Mamba-2, heads of two sizes and shared ones,
#: Mamba-2 beside attention in all blocks
HYBRIDS = (
    "lfm2",
    "qwen3_5_text",
    "qwen3_next",
    "jamba",
    "granitemoehybrid",
    "gemma4_text",
    "falcon_h1",
)
#: the blocks of each tiny model that keep keys and values
CACHED = {kind: [1] for kind in (*HYBRIDS, "qwen4_exp_text")}
CACHED |= {kind: [0, 1] for kind in ("gemma4_text", "granite_swa", "moshi", "falcon_h1")}


def decoded(model: PreTrainedModel, ids: Tensor, cache: Cache) -> Tensor:
    """Logits of a prefill and of single tokens after it."""
    parts = ids.split([5, *[1] * (ids.shape[1] - 5)], 1)
    return torch.cat([model(part, use_cache=True, **{CACHE: cache}).logits for part in parts], 1)


def simulated(model: PreTrainedModel, kv: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``model`` use transformers' cache, and round what attention gives to it."""
    of_block = {
        int(name.split(".")[-2]): kv_quantizers(kv, attention.get_buffer)
        for name, attention in model.named_modules()
        if hasattr(attention, "k_scale" if kv == "kv8" else "k_offset")
    }
    unquantize_kv(model)
    update = Cache.update

    def rounded(
        cache: Any, keys: Tensor, values: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        pairs = zip((keys, values), of_block[layer_idx], strict=True)
        keys, values = (q.dequantize(q.quantize(x), x.dtype) for x, q in pairs)
        return update(cache, keys, values, layer_idx, *args, **kwargs)

    monkeypatch.setattr(Cache, "update", rounded)


@pytest.mark.parametrize(
    "model_type",
    [*HYBRIDS, pytest.param("qwen4_exp_text", marks=needs_transformers("5.24"))],
)
@pytest.mark.parametrize(("kv", "recipe"), [("kv8", "fast"), ("kv8", "paper"), ("kv4", "best")])
@torch.no_grad()
def test_blocks_with_attention_alone_quantize_their_cache(
    model_type: str, kv: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = save_tiny(model_type, tmp_path / "source"), tmp_path / "out"
    proof.quantize(source, out, recipe, kv=kv)
    stored = SCALES if kv == "kv8" else tuple(NEUTRAL)
    assert [name for name in Checkpoint(out).entries if name.endswith((*SCALES, *NEUTRAL))] == [
        f"model.layers.{block}.self_attn.{name}" for block in CACHED[model_type] for name in stored
    ]
    assert not [row for row in qtool.verify(out) if row.problem]
    planned = qtool.plan(source, "w4a16", recipe=recipe, kv=kv)
    assert planned.output_bytes == Checkpoint(out).nbytes
    model, ids = qtool.load(out), torch.arange(3, 27).view(2, 12)
    full = model(ids, use_cache=False).logits
    assert proof.distance(decoded(model, ids, QuantCache.of(model)), full) < proof.TOLERANCE
    errors = kv_errors(model, proof.windows(source))
    assert list(errors) == CACHED[model_type]
    most = {"kv8": 0.02, "kv4": 0.15}[kv]
    assert all(0 < error < most for one in errors.values() for error in (one.keys, one.values))
    simulated(model, kv, monkeypatch)
    assert torch.equal(model(ids, **{CACHE: DynamicCache(config=model.config)}).logits, full)


@pytest.mark.parametrize(("model_type", "kv"), [("lfm2", "kv4"), ("qwen3_5_text", "kv8")])
def test_a_resumed_run_ends_at_the_same_bytes(model_type: str, kv: str, tmp_path: Path) -> None:
    source, whole = save_tiny(model_type, tmp_path / "source"), tmp_path / "whole"
    proof.quantize(source, whole, "paper", kv=kv)
    proof.resumes(source, tmp_path / "resumed", whole, kv=kv)


@pytest.mark.parametrize("model_type", ["qwen3_next", "gemma4_text", "granite_swa", "moshi"])
def test_an_export_has_scales_of_attention_alone(model_type: str, tmp_path: Path) -> None:
    """Granite SWA's attention has a tensor of its own, Moshi's linears lie in modules."""
    source, out = save_tiny(model_type, tmp_path / "source"), tmp_path / "out"
    proof.quantize(source, out, "fast", kv="kv8")
    for target, names in {
        "compressed-tensors": ["k_scale", "v_scale"],
        "gptq": [],  # has no place for them
    }.items():
        qtool.export(out, target, tmp_path / target)
        exported = Checkpoint(tmp_path / target).entries
        assert [name for name in exported if name.endswith(SCALES)] == [
            f"model.layers.{block}.self_attn.{name}"
            for block in CACHED[model_type]
            for name in names
        ]


def test_a_hybrid_is_evaluated_with_a_cache_and_reported(tmp_path: Path) -> None:
    source = save_tiny("lfm2", tmp_path / "source", vocab_size=4096)
    copy_tokenizer(source)
    options: dict[str, Any] = {"device": "cpu", "seqlen": 32, "limit": 2}
    plain, kv4 = (
        qtool.evaluate("demo", source, kv=kv, **options)[0]["demo"].metrics["perplexity"].value
        for kv in (None, "kv4")
    )
    assert plain != kv4 == pytest.approx(plain, rel=0.1)
    proof.quantize(source, tmp_path / "out", "fast", kv="kv8")
    [shown, _] = page.cache(build.collect(tmp_path / "out", None, "cpu"))
    assert shown["title"] == "keys" and shown["reading"].endswith("in block 1.")


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("mamba", {}), ("rwkv", {}), ("granitemoehybrid", {"layer_types": ["mamba", "mamba"]})],
)
def test_a_model_without_keys_and_values_is_refused(
    model_type: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    source = save_tiny(model_type, tmp_path / "source", **changes)
    with pytest.raises(QtoolError, match=r"none of its blocks keeps keys and values in a cache"):
        qtool.plan(source, "w4a16", kv="kv4")
