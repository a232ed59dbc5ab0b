"""Calibration windows that the model continues itself, after a few tokens of a text.

A text found elsewhere is rarely what a model has learned from, and what is fitted to it (Hessians,
scales, clipping) is fitted to inputs that come up less often than they seem to. Sampled at
temperature 1, a model's own continuations are distributed as it takes text to be (Williams et al.,
"Self-calibration for language model quantization and pruning", 2025; LLM-QAT does so for training).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from qtool.errors import QtoolError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: not cuDNN's, which makes a plan for each length of a cache: 60 ms a token on an H200, and not the
#: same each time
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.no_grad()
def continued(
    model: "PreTrainedModel",
    beginnings: Tensor,
    length: int,
    *,
    seed: int,
    at_once: int | None = None,
) -> Tensor:
    """Windows ``[B, length]`` on the CPU: ``beginnings [B, S]`` and the model's samples after them.

    Nothing ends a window early: a token that ends a document is followed by what the model takes to
    come next.

    Args:
        at_once: windows written side by side; what is drawn depends on it.

    Raises:
        QtoolError: NaN or Inf in the model's logits.
    """
    random, parts = torch.Generator(model.device).manual_seed(seed), []
    for part in beginnings.split(at_once or len(beginnings)):
        tokens, cache = [part.to(model.device)], _cache(model, length)
        finite = torch.ones((), dtype=torch.bool, device=model.device)
        for _ in range(length - beginnings.shape[1]):
            with sdpa_kernel(ATTENTION):
                out = model(tokens[-1], past_key_values=cache, use_cache=True, logits_to_keep=1)
            logits = out.logits[:, -1].float()
            finite &= torch.isfinite(logits).all()  # looked at after the loop: no wait for a GPU
            tokens.append(
                torch.multinomial(logits.nan_to_num(0, 0, 0).softmax(-1), 1, generator=random)
            )
        if not finite:
            raise QtoolError(
                "NaN or Inf in the model's logits: it cannot continue the calibration text"
            )
        parts.append(torch.cat(tokens, 1).cpu())
    return torch.cat(parts)


def _cache(model: "PreTrainedModel", length: int) -> Cache:
    """The model's cache with room for ``length`` tokens.

    Without it some layers copy all they have for each token.
    """
    cache = DynamicCache(config=model.config)
    cache.layers = [
        _Roomy(length) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class _Roomy(DynamicLayer):
    """Keys and values are the filled part of memory for ``length`` tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        filled = self.get_seq_length()
        if not filled:
            self.lazy_initialization(key_states, value_states)
            self.room = [
                t.new_empty(*t.shape[:2], self.length, t.shape[3])
                for t in (key_states, value_states)
            ]
        now = filled + key_states.shape[2]
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, filled:now] = new
        self.keys, self.values = (room[:, :, :now] for room in self.room)
        return self.keys, self.values
