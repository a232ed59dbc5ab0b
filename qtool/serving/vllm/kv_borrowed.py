"""kv4 and kv8 in pages of vLLM's own cache dtypes, where the list of these is closed (vLLM 0.26).

vLLM sizes a page by the name of the dtype, and a backend gives it a shape of that size. Two names
have pages of our size; nothing of what they mean in vLLM's own backends is used.
"""

from typing import Any, ClassVar

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
