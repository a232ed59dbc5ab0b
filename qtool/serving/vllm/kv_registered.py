"""kv4 and kv8 as cache dtypes of their own, which vLLM 0.33 lets a plugin register.

There a page of a layer is ``[H, 64, C]``, with C bytes for a token of a head, and the backend
defines C. Our page has no such rows: a head's codes, scales and zero points lie apart
(:mod:`qtool.kernels.attention.paged_cache`). Since nothing but our kernels reads a page, only the
size counts: C is a 64th of a head's bytes. A head must be contiguous, and so must a page.

Importing this module registers the dtypes.
"""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.config.cache import register_kv_cache_dtype
from vllm.v1.kv_cache_interface import KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout

from qtool.kernels.attention.packed_cache import TOKENS
from qtool.kernels.attention.paged_cache import head_bytes
from qtool.serving.vllm.attention import PagedBackend

CACHE_DTYPES = {"kv4": "qtool_kv4", "kv8": "qtool_kv8"}


@register_kv_cache_dtype(CACHE_DTYPES["kv4"])
class KV4Dtype:
    """kv4 as a cache dtype of vLLM."""

    name = CACHE_DTYPES["kv4"]

    def torch_dtype(self) -> torch.dtype:
        return torch.uint8

    def quant_mode(self) -> KVQuantMode:
        """The mode of a cache that no kernel of vLLM's reads.

        In vLLM 0.33.0 ``CUSTOM`` has the number of ``OCTAVE_K3V4`` and is another name of it; only
        backends for ROCm ask for that mode.
        """
        return KVQuantMode.CUSTOM


@register_kv_cache_dtype(CACHE_DTYPES["kv8"])
class KV8Dtype(KV4Dtype):
    """kv8 as a cache dtype of vLLM."""

    name = CACHE_DTYPES["kv8"]

    def torch_dtype(self) -> torch.dtype:
        return torch.int8


#: bits of a code by the dtype that holds codes; a spec tells no more of its cache dtype
BITS = {KV4Dtype().torch_dtype(): 4, KV8Dtype().torch_dtype(): 8}


class QtoolAttentionBackend(PagedBackend):
    """A layer's cache is ``[N, H, 64, C]``."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(CACHE_DTYPES.values())

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """``spec`` with C bytes for a token of a head; that of another dtype is unchanged."""
        if spec.kv_quant_mode != KVQuantMode.CUSTOM:
            return spec
        size = head_bytes(BITS[spec.dtype], spec.head_size) // TOKENS
        return replace(spec, state_content_bytes=size)

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts in which a page is contiguous; pages of other layers may lie between."""
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC
