"""The relative error of the keys and of the values in a quantized KV cache, block by block."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from qtool.models.auto import text_model
from qtool.models.cache_argument import CACHE
from qtool.runtime.kv_cache import QuantCache, QuantCacheLayer, quantized_decoder


@dataclass
class KVError:
    """``||X' - X|| / ||X||`` over all tokens of a block's keys (after RoPE) and values.

    X is the exact tensor, and X' the one that attention reads; the error of zeros that are read as
    zeros is 0.
    """

    keys: float
    values: float


@torch.no_grad()
def kv_errors(model: PreTrainedModel, windows: Tensor) -> dict[int, KVError]:
    """The error of each block with attention on ``windows [b, s]``, by its number.

    It is empty for a cache that is not quantized.
    """
    text = text_model(model)
    if quantized_decoder(model) is None:
        return {}
    sums: dict[int, list[Tensor]] = {}
    for window in windows:
        cache = QuantCache.of(model)
        for block, layer in enumerate(cache.layers):
            if isinstance(layer, QuantCacheLayer):
                zeros = [torch.zeros((), dtype=torch.float64) for _ in range(4)]
                total = sums.setdefault(block, zeros)
                layer.update = partial(_measure, layer.update, total)  # type: ignore[method-assign]
        text(input_ids=window[None].to(model.device), use_cache=True, **{CACHE: cache})
    return {
        block: KVError(_relative(k, kk), _relative(v, vv)) for block, (k, kk, v, vv) in sums.items()
    }


def _relative(error: Tensor, square: Tensor) -> float:
    """The root of a ratio of sums of squares; 0 if there is no ``error``."""
    return float((error / square).sqrt()) if error else 0.0


def _measure(
    update: Callable[..., tuple[Tensor, Tensor]],
    total: list[Tensor],
    keys: Tensor,
    values: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """A layer's ``update`` that adds squared errors and squares of keys and values to ``total``."""
    read = update(keys, values, *args, **kwargs)
    for place, (exact, seen) in enumerate(zip((keys, values), read, strict=True)):
        total[2 * place] += (seen - exact).double().square().sum().cpu()
        total[2 * place + 1] += exact.double().square().sum().cpu()
    return read
