"""Attention over a quantized KV cache, by a kernel that reads it packed or by torch's SDPA.

``quantize_kv`` (:mod:`qtool.runtime.kv_cache`) sets a model that would use SDPA to :data:`NAME`. On
a CUDA GPU a cache layer then hands its packed tokens, not tensors, through the attention module to
:func:`attend`; they are dequantized only for options that the kernel lacks. Attention may also do
other things with keys and values, for which it needs tensors. So the first ones that a layer hands
out are :class:`Handed`, which notice it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qtool.kernels.dtypes import HALF
from qtool.runtime.packed_kv import PackedTokens, kernel_packs
from qtool.schemes.kv import KV4

NAME = "qtool_kv"
#: up to so many new tokens per forward the kernel is faster than SDPA on dequantized tokens
MOST_QUERIES = 8


@dataclass
class Reads:
    """By whom keys and values were read that a cache layer handed out."""

    to_attend: bool = False
    otherwise: bool = False

    @property
    def only_to_attend(self) -> bool:
        """Whether :func:`attend` got them, and nothing else looked at them."""
        return self.to_attend and not self.otherwise


class Handed(Tensor):
    """Keys or values that note in :attr:`reads` by whom they are read."""

    reads: Reads

    @staticmethod
    def of(tensor: Tensor, reads: Reads) -> "Handed":
        """``tensor`` as one that notes its readers in ``reads``."""
        handed = tensor.as_subclass(Handed)
        handed.reads = reads
        return handed

    def attended(self) -> Tensor:
        """The tensor itself, for :func:`attend`."""
        self.reads.to_attend = True
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Handed):
                value.reads.otherwise = True
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def kernel_reads(stored: PackedTokens, new: Tensor) -> bool:
    """Whether the kernel can attend to ``stored`` for queries like ``new [B, H, T, D]``."""
    return (
        new.device.type == "cuda"
        and new.dtype in HALF
        and new.shape[2] <= MOST_QUERIES
        and kernel_packs(stored.quantizer, new)
    )


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor | PackedTokens,
    value: Tensor | PackedTokens,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: output ``[B, Tq, Hq, D]`` of ``query [B, Hq, Tq, D]``."""
    if isinstance(key, PackedTokens) and isinstance(value, PackedTokens):
        bool_mask = attention_mask is None or (
            attention_mask.dtype == torch.bool and attention_mask.shape[1] == 1
        )
        softcap = kwargs.get("softcap")
        # the kernel leaves the keys' offset out, which shifts all scores of a query by one number:
        # only soft caps are changed by that
        shifted = softcap and isinstance(key.quantizer, KV4) and key.quantizer.offset is not None
        if bool_mask and not dropout and not shifted and kwargs.get("position_bias") is None:
            return _packed(query, key, value, attention_mask, scaling, softcap), None
    keys, values = _as_tensor(key), _as_tensor(value)
    return sdpa_attention_forward(
        module, query, keys, values, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )


def _as_tensor(x: Tensor | PackedTokens) -> Tensor:
    if isinstance(x, PackedTokens):
        return x.read()
    return x.attended() if isinstance(x, Handed) else x


def _packed(
    query: Tensor,
    key: PackedTokens,
    value: PackedTokens,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
) -> Tensor:
    from qtool.kernels.attention.kv_attention import kv_attention

    batch, _, queries, dim = query.shape
    if mask is not None:  # [B or 1, 1, Tq, T]; a sliding window is in it
        mask = mask[:, 0].expand(batch, queries, -1).contiguous()
    scale = dim**-0.5 if scaling is None else scaling
    parts = (*key.kernel_arguments(), *value.kernel_arguments())
    out = kv_attention(query.contiguous(), *parts, key.tokens, None, mask, scale, softcap or 0.0, 0)
    return out.transpose(1, 2).contiguous()


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
