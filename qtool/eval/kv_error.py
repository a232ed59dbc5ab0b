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
    squares: dict[int, Tensor] = {}  # of keys and of values, each of the error and of the tensor
    for window in windows:
        cache = QuantCache.of(model)
        for block, layer in enumerate(cache.layers):
            if isinstance(layer, QuantCacheLayer):
                sums = squares.setdefault(block, torch.zeros(2, 2, dtype=torch.float64))
                layer.update = partial(_measure, layer.update, sums)  # type: ignore[method-assign]
        text(input_ids=window[None].to(model.device), use_cache=True, **{CACHE: cache})
    return {
        block: KVError(_relative(*keys), _relative(*values))
        for block, (keys, values) in squares.items()
    }


def _relative(error: Tensor, square: Tensor) -> float:
    """The root of a ratio of sums of squares; 0 if there is no ``error``."""
    return float((error / square).sqrt()) if error else 0.0


def _measure(
    update: Callable[..., tuple[Tensor, Tensor]],
    squares: Tensor,
    keys: Tensor,
    values: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """A layer's ``update`` that adds squares of errors and of tensors to ``squares [2, 2]``."""
    read = update(keys, values, *args, **kwargs)
    for sums, exact, seen in zip(squares, (keys, values), read, strict=True):
        sums[0] += (seen - exact).double().square().sum().cpu()
        sums[1] += exact.double().square().sum().cpu()
    return read
