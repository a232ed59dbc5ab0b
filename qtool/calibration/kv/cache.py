"""The KV cache in calibration: its static scales, and blocks that see quantized keys and values.

Attention gives its keys (after RoPE) and values to the object in place of the KV cache, and
continues with those that it gets back. The objects here observe them, or quantize them exactly as
the cache will.

Legend: B sequences in a batch, H kv heads, S tokens, D head dimension.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.forwards import run
from qtool.calibration.statistics import maximum, subset
from qtool.calibration.transforms.queries import are_made_as_known, queries_of
from qtool.calibration.transforms.smooth_attention import cache_errors, observe_keys
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.runtime.packed_kv import (
    IMPORTANCE,
    NEUTRAL,
    OFFSET,
    PackedTokens,
    kv_quantizers,
    kv_tensors,
)
from qtool.schemes.kv import KV4, KVQuantizer, static_scale

#: number of calibration sequences on which queries are observed
SEQUENCES = 16


class KVObserver:
    """Keeps the largest magnitudes ``[H, D]`` of keys and values, in place of a KV cache."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Observe both ``[B, H, S, D]`` and return them."""
        self.keys = maximum((self.keys, keys.abs().amax((0, 2)).float()))
        self.values = maximum((self.values, values.abs().amax((0, 2)).float()))
        return keys, values


class ExactKV:
    """Returns keys and values unchanged, in place of a KV cache."""

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Both, unchanged."""
        return keys, values


class SimulatedKV:
    """Quantizes and dequantizes keys and values ``[B, H, S, D]``, in place of an empty KV cache.

    Gradients pass straight through, so that a block can be trained with it.
    """

    def __init__(self, keys: KVQuantizer, values: KVQuantizer) -> None:
        self.quantizers = keys, values

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Both, quantized and dequantized; nothing is stored."""
        key_quantizer, value_quantizer = self.quantizers
        return _read_back(key_quantizer, keys), _read_back(value_quantizer, values)


def _read_back(quantizer: KVQuantizer, x: Tensor) -> Tensor:
    read = PackedTokens(quantizer).append(x.detach())
    return x + (read - x).detach() if x.requires_grad else read


def kv_constants(block: Block, kv: str | None, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """The tensors that ``block`` stores for the KV quantizer ``kv``, by name within the block.

    They are kv8's scales, or kv4's offset and importance of keys; none for a block without a KV
    cache. Without batches kv4's tensors are neutral.

    Raises:
        QtoolError: static scales without calibration data, or NaN in keys or values.
    """
    stored = kv_tensors(kv, block.family, block.config)
    if not stored or (cache := block.family.kv_cache) is None:
        return {}
    if cache.tensor(OFFSET) in stored:
        neutral = {
            name: torch.full(t.shape, NEUTRAL[name.rpartition(".")[2]])
            for name, t in stored.items()
        }
        measured = _offset_and_importance(block, batches)
        return neutral | {cache.tensor(name): tensor for name, tensor in measured.items()}
    keys, values = _largest(block, batches)
    if keys is None or values is None:
        raise QtoolError(f"{kv} has static scales: it needs calibration data, pass --calib")
    return {
        cache.tensor("k_scale"): static_scale(keys).cpu(),
        cache.tensor("v_scale"): static_scale(values).cpu(),
    }


def _offset_and_importance(block: Block, batches: Sequence[Batch]) -> dict[str, Tensor]:
    """kv4's mean of each key channel and the power of its queries; empty without batches.

    Weights of queries that are not known to be made in the common way are stored only where they
    lower the error of the block's output.
    """
    if (seen := observe_keys(block, batches)) is None:
        return {}
    few, offset = subset(batches, SEQUENCES), {OFFSET: seen.mean.cpu()}
    if (queries := queries_of(block, few)) is None:
        return offset
    weighted = offset | {IMPORTANCE: queries.importance().cpu()}
    if are_made_as_known(block):
        return weighted
    choices = {"even": None, "weighted": queries.importance()}
    caches = {n: SimulatedKV(KV4(seen.mean, weights), KV4()) for n, weights in choices.items()}
    errors = cache_errors(block, few, caches)
    return weighted if errors["weighted"] < errors["even"] else offset


def _largest(block: Block, batches: Sequence[Batch]) -> tuple[Tensor | None, Tensor | None]:
    """The largest magnitudes ``[H, D]`` of keys and of values, of all ranks' batches."""
    observer = KVObserver()
    for batch in batches:
        run(block, batch, **block.with_cache(observer))
    of_ranks = ranks.all_gather((observer.keys, observer.values))
    keys, values = zip(*of_ranks, strict=True)
    return maximum(keys), maximum(values)


@contextmanager
def quantized_kv(block: Block, kv: str | None, stored: Mapping[str, Tensor]) -> Iterator[None]:
    """Let ``block`` compute with quantized keys and values while the context is open.

    A run with a cache among its arguments uses that one; ``block.full_kv`` has full precision.
    Nothing changes for a block that has no KV cache.

    Args:
        stored: tensors by their name within the block, including :func:`kv_constants`.
    """
    if kv is None or (cache := block.family.kv_cache) is None:
        yield
        return
    quantizers = kv_quantizers(kv, lambda name: stored[cache.tensor(name)].to(block.device))
    simulated = SimulatedKV(*quantizers)

    def supply(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Any]:
        own = kwargs.get(cache.argument)
        return args, kwargs | (block.with_cache(simulated) if own is None else {})

    handle = block.module.register_forward_pre_hook(supply, with_kwargs=True)
    block.full_kv = block.with_cache(ExactKV())
    try:
        yield
    finally:
        handle.remove()
        block.full_kv = {}
