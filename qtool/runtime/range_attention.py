"""Attention of one token per sequence over a range of its keys: all, or a sliding window.

It runs in a kernel that splits long ranges over the GPU, or, if there are enough sequences to fill
it, in :mod:`.range_attention_triton`. transformers' own path repeats the keys of grouped queries in
memory.

Legend: B batch, Hq query and H kv heads, C capacity of the cache, D head dimension.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qtool.runtime import range_attention_triton

#: the name of :func:`attend` among transformers' attention functions
RANGE_ATTENTION = "qtool_static"
#: attention options that change nothing for one query over a range of keys; a layer's window is in
#: its ranges
KNOWN_TO_RANGES = {"sliding_window", "is_causal", "position_ids", "use_cache", "output_attentions"}

#: int32: 0 to B; the place of each sequence's first token among B * C, then B * C; token counts
Ranges = tuple[Tensor, Tensor, Tensor]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    key_ranges: list[Ranges] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: output ``[B, 1, Hq, D]`` of ``query [B, Hq, 1, D]``.

    ``key_ranges`` are the ranges of each layer. Without them it is torch's SDPA for any number of
    queries.
    """
    unknown = {name for name, given in kwargs.items() if given is not None} - KNOWN_TO_RANGES
    if key_ranges is not None and not unknown and key.shape == value.shape:
        return attention_over_ranges(query, key, value, key_ranges[module.layer_idx], scaling), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def attention_over_ranges(
    query: Tensor, key: Tensor, value: Tensor, ranges: Ranges, scaling: float | None
) -> Tensor:
    """``[B, 1, Hq, D]``: attention of ``query [B, Hq, 1, D]`` over its ranges of keys and values.

    ``key`` and ``value`` are ``[B, H, C, D]``.
    """
    (numbers, starts, used), capacity = ranges, key.shape[2]
    query = query.squeeze(2)
    key, value = (t.transpose(1, 2).flatten(0, 1) for t in (key, value))  # [B * C, H, D]
    if range_attention_triton.runs_on(query, key):
        out = range_attention_triton.attend(query, key, value, starts, used, scaling)
        return out.unsqueeze(1)
    out = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        *(numbers, starts, 1, capacity, 0.0, False, False),
        scale=scaling,
        seqused_k=used,
    )[0]
    return out.unsqueeze(1)


def ranges_of(mask: Tensor) -> Ranges:
    """The ranges that ``mask``, bool ``[B, 1, 1, C]``, shows: ``[B + 1]``, ``[B + 1]``, ``[B]``."""
    shown = mask[:, 0, 0]  # [B, C]
    batch, capacity = shown.shape
    first = shown.int().argmax(-1)
    numbers = torch.arange(batch + 1, dtype=torch.int32, device=mask.device)
    starts = numbers * capacity
    starts[:batch] += first
    return numbers, starts, shown.sum(-1, dtype=torch.int32)


def last_of(ranges: Ranges, window: int | None) -> Ranges:
    """The last ``window`` tokens of each of ``ranges``; all without a window."""
    if window is None:
        return ranges
    numbers, starts, used = ranges
    hidden = nn.functional.pad((used - window).clamp_min(0), (0, 1))
    return numbers, starts + hidden, used.clamp_max(window)


def mask_of(ranges: Ranges, capacity: int) -> Tensor:
    """The mask, bool ``[B, 1, 1, C]``, that shows ``ranges``."""
    numbers, starts, used = ranges
    first = (starts - numbers * capacity)[:-1, None]  # [B, 1]
    at = torch.arange(capacity, device=first.device)
    return ((at >= first) & (at < first + used[:, None]))[:, None, None]


def are_ranges(mask: Tensor) -> Tensor:
    """Whether ``mask``, bool ``[B, 1, 1, C]``, shows one range of each sequence: bool ``[B]``."""
    shown = mask[:, 0, 0]
    return (shown[:, 1:] > shown[:, :-1]).sum(-1) + shown[:, 0] == 1


AttentionInterface.register(RANGE_ATTENTION, attend)
AttentionMaskInterface.register(RANGE_ATTENTION, sdpa_mask)
