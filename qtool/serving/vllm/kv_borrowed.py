"""kv4 and kv8 in pages of vLLM's own cache dtypes, to which none can be added (vLLM 0.26).

vLLM sizes a page by the name of the dtype, and a backend gives it a shape of that size. Two names
have pages of our size; their meaning in vLLM's own backends is not used. In layers with a sliding
window vLLM gives 4-bit codes as much room as 8-bit ones, so these layers have a spec of ours.

Importing this module registers it.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import KVQuantMode, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from qtool.errors import QtoolError
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.kernels.attention.paged_cache import head_bytes
from qtool.serving.vllm.attention import PagedBackend

#: vLLM's cache dtype whose page has the size of ours
CACHE_DTYPES = {"kv4": "int4_per_token_head", "kv8": "int8_per_token_head"}
BITS = {"int4_per_token_head": 4, "int8_per_token_head": 8}


class QtoolAttentionBackend(PagedBackend):
    """A layer's cache is ``[N, H, bytes of a head]``."""

    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(BITS)

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """``[N, H, bytes of a head]``: see :mod:`qtool.kernels.attention.paged_cache`."""
        if block_size != TOKENS:
            raise QtoolError(f"pages of {block_size} tokens; the kernels want {TOKENS}")
        return num_blocks, num_kv_heads, head_bytes(BITS[cache_dtype_str], head_size)


@dataclass(frozen=True, kw_only=True)
class WindowSpec(SlidingWindowSpec):
    """A layer with a sliding window whose pages have the size of the other layers'."""

    @property
    def real_page_size_bytes(self) -> int:
        halved = self.kv_quant_mode == KVQuantMode.INT4_PER_TOKEN_HEAD
        return super().real_page_size_bytes // (2 if halved else 1)


KVCacheSpecRegistry._ensure_registered()  # vLLM's own, which it registers only if there are none
KVCacheSpecRegistry.register(WindowSpec, SlidingWindowManager, SlidingWindowSpec)


def size_window(layer: Any) -> None:
    """Let vLLM's attention layer ask for pages of our size if it has a sliding window."""
    asked: Callable[[Any], Any] = layer.get_kv_cache_spec

    def get_kv_cache_spec(config: Any) -> Any:
        spec = asked(config)
        if type(spec) is not SlidingWindowSpec:
            return spec
        return WindowSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)})

    layer.get_kv_cache_spec = get_kv_cache_spec
