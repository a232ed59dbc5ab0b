"""The quantized KV cache as a transformers ``Cache``, and the models that always use it.

Layers hold packed codes and parameters (:mod:`qtool.runtime.packed_kv`); attention gets all tokens
dequantized, those of the current forward included, or on a GPU reads them packed
(:mod:`qtool.runtime.kv_attention`). So a perplexity is computed through the quantized cache,
whether or not its caller asks for a cache. In ``kv4-channel`` a token is read in 16 bits until its
group is full; a forward over many tokens reads the full groups quantized, also for the queries
inside them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    LinearAttentionLayer,
)

from qtool.errors import QtoolError
from qtool.models import Family, family_of
from qtool.models.cache_argument import CACHE, with_cache_renamed
from qtool.runtime import kv_attention
from qtool.runtime.kv_attention import Handed, Reads, kernel_reads
from qtool.runtime.linear import keep_dtypes
from qtool.runtime.packed_kv import (
    NEUTRAL,
    SCALES,
    PackedTokens,
    kv_quantizers,
    kv_tensors,
)
from qtool.schemes.kv import KVQuantizer


class QuantCacheLayer(DynamicLayer):
    """A layer that grows by appending codes; ``keys`` and ``values`` of the base class stay empty.

    Every token is kept under a sliding window too: the model's mask hides the old ones.

    Args:
        heads: kv heads; keys and values that come repeated for their query heads are kept once.
        attends: the model's attention function is :func:`.kv_attention.attend`.
        beside: what transformers' layer keeps beside keys and values, by attribute.

    Attributes:
        reads: by whom keys and values of :meth:`update` were read.
    """

    def __init__(
        self,
        keys: KVQuantizer,
        values: KVQuantizer,
        *,
        heads: int,
        attends: bool = False,
        beside: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        vars(self).update(beside)
        super().__init__()
        self.quantizers = (keys, values)
        self.heads, self.attends, self.reads = heads, attends, Reads()
        self.stored = (PackedTokens(keys), PackedTokens(values))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = key_states.new_empty(0), value_states.new_empty(0)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Store keys (after RoPE) and values ``[B, H, T, D]`` and return all of them.

        They are dequantized; or packed, if the attention kernel reads them so, and an earlier call
        showed that nothing else looks at them.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self.stored
        repeats = key_states.shape[1] // self.heads
        keys.store(key_states[:, ::repeats])
        values.store(value_states[:, ::repeats])
        if self.reads.only_to_attend and kernel_reads(keys, key_states):
            return keys, values
        found = [keys.read(), values.read()]
        if repeats > 1:
            found = [x.repeat_interleave(repeats, 1) for x in found]
        elif self.attends and self.reads == Reads():
            found = [Handed.of(x, self.reads) for x in found]
        return found[0], found[1]

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether a rollback is exact: a cut group of several tokens is not restored."""
        return all(quantizer.tokens == 1 for quantizer in self.quantizers)

    def get_seq_length(self) -> int:
        return self.stored[0].tokens

    def reset(self) -> None:
        QuantCacheLayer.__init__(self, *self.quantizers, heads=self.heads, attends=self.attends)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): expected minus the number of tokens to remove"
            )
        for stored in self.stored:
            stored.crop(max(stored.tokens + tokens_to_remove, 0))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._apply(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._apply(lambda t: t.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._apply(lambda t: t[indices])

    def offload(self) -> None:
        self._apply(lambda t: t.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        if self.is_initialized:
            self._apply(lambda t: t.to(self.device, non_blocking=True))

    def _apply(self, change: Any) -> None:
        for stored in self.stored:
            stored.apply(change)


def _of_both(name: str) -> Callable[..., None]:
    """The method ``name`` for states and for keys and values."""

    def call(layer: DynamicLayer, *args: Any) -> None:
        for part in (LinearAttentionLayer, QuantCacheLayer):
            getattr(part, name)(layer, *args)

    return call


class RecurrentQuantCacheLayer(LinearAttentionLayer, QuantCacheLayer):  # type: ignore[misc]
    """A layer for a block with attention and a recurrent layer (Falcon-H1); its states stay."""

    is_compileable = is_croppable = False
    __init__ = QuantCacheLayer.__init__

    def lazy_initialization(self, *keys_and_values: Any, **states: Any) -> None:
        part: Any = QuantCacheLayer if keys_and_values else LinearAttentionLayer
        part.lazy_initialization(self, *keys_and_values, **states)

    reset, crop, reorder_cache = map(_of_both, ("reset", "crop", "reorder_cache"))
    offload, prefetch = map(_of_both, ("offload", "prefetch"))


class IndexedQuantCacheLayer(DynamicIndexedLayer, QuantCacheLayer):  # type: ignore[misc]
    """A layer for attention to tokens that an indexer chooses (Qwen4); the indexer's keys stay."""

    __init__ = QuantCacheLayer.__init__


class QuantCache(Cache):
    """A cache whose layers of attention are :class:`QuantCacheLayer`.

    Those of recurrent blocks are transformers' own. Pass a cache to ``generate`` or a forward to
    look at it afterwards.
    """

    @classmethod
    def of(cls, model: PreTrainedModel) -> "QuantCache":
        """An empty cache as ``model`` (:func:`quantize_kv`) makes it for itself."""
        decoder = quantized_decoder(model)
        assert decoder is not None, "no cache is quantized"
        return cls(layers=_layers(decoder))


def quantize_kv(model: PreTrainedModel, kv: str) -> None:
    """Let forwards and ``generate`` of ``model`` hold keys and values quantized by ``kv``.

    Each tensor that a checkpoint stores for it (:func:`~qtool.runtime.packed_kv.kv_tensors`)
    becomes a buffer of the module that gives keys and values to the cache. Until it is loaded the
    buffer holds a value without effect, or zeros if it is a scale.

    Raises:
        QtoolError: an unknown architecture or quantizer, or one that cannot hold the model's heads.
    """
    family = family_of(model.config)
    decoder: Any = model.get_submodule(family.blocks.rpartition(".")[0])
    settings = family.settings(model.config.to_dict())
    of_blocks = family.of_blocks(settings)
    scales = [kv_tensors(kv, own, settings) for own in of_blocks]
    caches = {n: own for n, own in enumerate(of_blocks) if own.kv_cache}
    for number, own in caches.items():
        attention = _attention(decoder, number, own)
        for name, spec in scales[number].items():
            attribute = name.rpartition(".")[2]
            if not hasattr(attention, attribute):
                # attention that is packed has buffers alone, one without linears nothing
                held = attention.parameters(), attention.buffers(), decoder.parameters()
                device = next(chain(*held)).device
                neutral = torch.full(
                    spec.shape, NEUTRAL.get(attribute, 0.0), dtype=spec.dtype, device=device
                )
                attention.register_buffer(attribute, neutral)
        attention._apply = partial(_apply, attention)  # type: ignore[method-assign]
    if decoder.config._attn_implementation == "sdpa" and decoder._can_set_attn_implementation():
        decoder.config._attn_implementation = kv_attention.NAME
    if not hasattr(decoder, "kv_quantizer"):
        decoder.kv_supply = decoder.register_forward_pre_hook(_supply, with_kwargs=True)
        decoder.kv_keep = decoder.register_forward_hook(_keep, with_kwargs=True)
    decoder.kv_quantizer, decoder.kv_blocks = kv, caches


def _apply(attention: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``attention._apply(fn)`` that moves the stored tensors of the cache without a cast."""
    stored = {n: b for n, b in attention.named_buffers(recurse=False) if n in (*SCALES, *NEUTRAL)}
    type(attention)._apply(attention, fn, recurse)
    keep_dtypes(attention, stored)
    return attention


def quantized_decoder(model: PreTrainedModel) -> Any:
    """The module of ``model`` that :func:`quantize_kv` gave its cache; None if there is none."""
    return next((module for module in model.modules() if hasattr(module, "kv_quantizer")), None)


def unquantize_kv(model: PreTrainedModel) -> None:
    """Undo :func:`quantize_kv`, except that the buffers stay."""
    decoder = quantized_decoder(model)
    decoder.kv_supply.remove()
    decoder.kv_keep.remove()
    del decoder.kv_supply, decoder.kv_keep, decoder.kv_quantizer, decoder.kv_blocks
    if decoder.config._attn_implementation == kv_attention.NAME:
        decoder.config._attn_implementation = "sdpa"


def require_scales(model: PreTrainedModel) -> None:
    """Refuse static scales that are absent from the checkpoint or damaged.

    Raises:
        QtoolError: naming the tensor.
    """
    for name, tensor in model.named_buffers():
        if name.rpartition(".")[2] in SCALES and not (torch.isfinite(tensor) & (tensor > 0)).all():
            raise QtoolError(
                f"{name}: a scale of the KV cache is missing, or not a positive number"
            )


def _supply(
    decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], Any]:
    """Give a forward without a cache a quantized one, and an empty cache quantized layers."""
    named = dict(zip(inspect.signature(decoder.forward).parameters, args, strict=False)) | kwargs
    named = with_cache_renamed(named)
    cache = named.get(CACHE)
    if cache is None:
        named[CACHE] = QuantCache(layers=_layers(decoder))
    elif isinstance(cache, DynamicCache) and cache.get_seq_length() == 0:
        cache.layers = _layers(decoder, cache.layers)
    elif not any(isinstance(layer, QuantCacheLayer) for layer in cache.layers):
        raise QtoolError(
            f"the model's KV cache is {decoder.kv_quantizer}, but it was given a filled or static "
            f"{type(cache).__name__}; expected no cache, an empty DynamicCache or a QuantCache"
        )
    return (), named


def _keep(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Drop the cache that :func:`_supply` supplied where ``use_cache`` is off."""
    if kwargs.get("use_cache") is False and hasattr(output, CACHE):
        output[CACHE] = None  # the attribute alone would leave it to ``**output`` of a wrapper


def _layers(decoder: nn.Module, given: Sequence[Any] = ()) -> list[Any]:
    """The layers of an empty cache: quantized ones for attention, transformers' own for the rest.

    The rest are those of ``given``, an empty cache's, which may know that they will be cropped.
    """
    kv: str = decoder.kv_quantizer  # type: ignore[assignment]
    blocks: dict[int, Family] = decoder.kv_blocks  # type: ignore[assignment]
    config: Any = decoder.config
    layers: list[Any] = list(given) or DynamicCache(config=config).layers
    for number, own in blocks.items():
        assert own.kv_cache is not None
        layers[number] = _layer_class(layers[number])(
            *kv_quantizers(kv, _attention(decoder, number, own).get_buffer),
            heads=own.kv_cache.heads(config)[0],
            attends=config._attn_implementation == kv_attention.NAME,
            beside=vars(layers[number]),
        )
    return layers


def _layer_class(given: Any) -> type[QuantCacheLayer]:
    """The class of the layer that takes the place of transformers' layer ``given``."""
    if isinstance(given, LinearAttentionLayer):
        return RecurrentQuantCacheLayer
    return IndexedQuantCacheLayer if isinstance(given, DynamicIndexedLayer) else QuantCacheLayer


def _attention(decoder: nn.Module, number: int, own: Family) -> nn.Module:
    """The module of block ``number`` that gives keys and values to the cache."""
    assert own.kv_cache is not None
    blocks = own.blocks.rpartition(".")[2]
    return decoder.get_submodule(f"{blocks}.{number}.{own.kv_cache.module}".removesuffix("."))
