"""Attention over a kv4 or kv8 cache in vLLM's pages, chosen by :mod:`qtool.serving.vllm.kv`.

Versions of vLLM differ in how they accept such pages: :mod:`qtool.serving.vllm.kv_borrowed` and
:mod:`qtool.serving.vllm.kv_registered` complete the backend here.

New keys and values are quantized straight into the pages. Decoding reads the codes by
``qtool::kv_attention_paged``. A prefill is FlashAttention over the 16-bit keys and values of the
new tokens. If a sequence has earlier tokens (a later chunk, a cached prefix), these are first
dequantized beside the new ones.

Legend: T tokens of a step, Hq query and H kv heads, D head dimension, N pages.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from qtool.errors import QtoolError
from qtool.kernels.attention.kv_append_paged import kv_append_paged
from qtool.kernels.attention.kv_attention_paged import kv_attention_paged
from qtool.kernels.attention.kv_gather import kv_gather
from qtool.kernels.attention.packed_cache import TOKENS, takes_head_dim
from qtool.serving.vllm.engine import READ_BACK


@dataclass
class Prefills:
    """Sequences of one FlashAttention call.

    Attributes:
        requests: the slice of the batch's sequences.
        tokens: the slice of the batch's new tokens.
        queries: int32 ``[n + 1]``, where the new tokens of each sequence start among ``tokens``.
        longest_query: the most new tokens of any sequence.
        longest: the most tokens of any sequence, earlier ones included.
        starts: int32 ``[n + 1]``, where all tokens of each sequence start.
        cached: argument of ``kv_gather``; None if there are no earlier tokens.
        total: tokens of all sequences.
    """

    requests: slice
    tokens: slice
    queries: Tensor
    longest_query: int
    longest: int
    starts: Tensor
    cached: Tensor | None
    total: int


@dataclass
class Metadata(AttentionMetadata):
    """The sequences of one step; decodes come first, with one token each.

    Attributes:
        lengths: int32 ``[B]`` tokens of each sequence.
        table: int32 ``[B, M]`` pages of each sequence.
        capacity: the most tokens of any sequence, ever.
    """

    lengths: Tensor
    table: Tensor
    decodes: int
    prefills: list[Prefills]
    capacity: int


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    """Cuts a step into decodes and prefills."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = (
        AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    )

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        self.room = gather_room(vllm_config)
        self.read_back = bool(vllm_config.additional_config.get(READ_BACK, False))

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        common = common_attn_metadata
        decodes, prefills, _, _ = split_decodes_and_prefills(common)
        table = common.block_table_tensor
        most = self.vllm_config.model_config.max_model_len
        return Metadata(
            lengths=common.seq_lens,
            table=table,
            decodes=decodes,
            prefills=self.prefills(common, decodes) if prefills else [],
            capacity=min(most, table.shape[1] * TOKENS),
        )

    def prefills(self, common: CommonAttentionMetadata, decodes: int) -> list[Prefills]:
        """The sequences from ``decodes`` on, in calls whose tokens fit the room for them."""
        bounds = common.query_start_loc_cpu.tolist()
        known = common.seq_lens_cpu_upper_bound  # exact if there are several new tokens
        lengths = (common.seq_lens.cpu() if known is None else known).tolist()
        calls, first, tokens = [], decodes, 0
        for request in range(decodes, common.num_reqs):
            if request > first and tokens + lengths[request] > self.room:
                calls.append((first, request))
                first, tokens = request, 0
            tokens += lengths[request]
        calls.append((first, common.num_reqs))
        return [self._call(slice(*call), bounds, lengths) for call in calls]

    def _call(self, requests: slice, bounds: list[int], lengths: list[int]) -> Prefills:
        starts, ends = bounds[requests], bounds[requests.start + 1 : requests.stop + 1]
        new = [end - start for start, end in zip(starts, ends, strict=True)]
        every = lengths[requests]
        before = every if self.read_back else [e - n for e, n in zip(every, new, strict=True)]
        more, queries = any(before), self._sums(new)
        return Prefills(
            requests=requests,
            tokens=slice(starts[0], ends[-1]),
            queries=queries,
            longest_query=max(new),
            longest=max(every),
            starts=self._sums(every) if more else queries,
            cached=self._int32(before) if more else None,
            total=sum(every),
        )

    def _sums(self, sizes: list[int]) -> Tensor:
        return self._int32(list(accumulate(sizes, initial=0)))

    def _int32(self, numbers: list[int]) -> Tensor:
        there = torch.tensor(numbers, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        return there.to(self.device, non_blocking=True)


class QtoolAttention(AttentionImpl[Metadata]):
    """Attention of a layer whose calibrated tensors :class:`qtool.serving.vllm.kv.KVMethod` holds.

    Raises:
        QtoolError: for an option that the kernels lack.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **more: Any,
    ) -> None:
        if alibi_slopes is not None or kv_sharing_target_layer_name is not None:
            raise QtoolError(
                "the quantized KV cache serves no ALiBi and no cache that layers share; choose "
                "--attention-backend FLASH_ATTN"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.window, self.softcap = sliding_window or 0, logits_soft_cap or 0.0
        self.room = gather_room(get_current_vllm_config())
        self.flash_version = fa_utils.get_flash_attn_version(head_size=head_size)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Quantize keys and values ``[T, H, D]`` into their slots."""
        tokens = slot_mapping.shape[0]
        kv_append_paged(
            key=key[:tokens],
            value=value[:tokens],
            pages=head_rows(kv_cache),
            slots=slot_mapping,
            k_scale=layer.cache_k_scale,
            v_scale=layer.cache_v_scale,
            k_offset=layer.cache_k_offset,
            k_importance=layer.cache_k_importance,
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Fill ``output [T, Hq, D]``, except for tokens of padding."""
        assert output is not None
        if attn_metadata is None:  # vLLM measures the memory of a step
            self.workspace(query)
            return output.zero_()
        pages, decodes = head_rows(kv_cache), attn_metadata.decodes
        if decodes:
            kv_attention_paged(
                query=query[:decodes],
                pages=pages,
                table=attn_metadata.table[:decodes],
                lengths=attn_metadata.lengths[:decodes],
                k_scale=layer.cache_k_scale,
                v_scale=layer.cache_v_scale,
                k_offset=layer.cache_k_offset,
                out=output[:decodes],
                tokens=attn_metadata.capacity,
                scaling=self.scale,
                softcap=self.softcap,
                window=self.window,
            )
        for call in attn_metadata.prefills:
            self._prefill(layer, call, query, key, value, pages, attn_metadata.table, output)
        return output

    def _prefill(
        self,
        layer: Any,
        call: Prefills,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pages: Tensor,
        table: Tensor,
        output: Tensor,
    ) -> None:
        """FlashAttention over a call's new tokens, and over earlier ones that are dequantized."""
        keys, values = key[call.tokens], value[call.tokens]
        if call.cached is not None:
            room = self.workspace(query, call.total)
            kv_gather(
                key=keys,
                value=values,
                pages=pages,
                table=table[call.requests],
                k_scale=layer.cache_k_scale,
                v_scale=layer.cache_v_scale,
                k_offset=layer.cache_k_offset,
                starts=call.starts,
                fresh=call.queries,
                cached=call.cached,
                keys=room[0],
                values=room[1],
                total=call.total,
                window=self.window,
            )
            keys, values = room
        fa_utils.flash_attn_varlen_func(
            q=query[call.tokens],
            k=keys,
            v=values,
            out=output[call.tokens],
            cu_seqlens_q=call.queries,
            cu_seqlens_k=call.starts,
            max_seqlen_q=call.longest_query,
            max_seqlen_k=call.longest,
            softmax_scale=self.scale,
            causal=True,
            window_size=[self.window - 1, 0] if self.window else [-1, -1],
            softcap=self.softcap,
            fa_version=self.flash_version,
        )

    def workspace(self, like: Tensor, rows: int = 0) -> list[Tensor]:
        """Room for keys and values ``[rows, H, D]``, the same for all layers."""
        shape = (max(rows, self.room), self.num_kv_heads, self.head_size)
        if not is_workspace_manager_initialized():
            return [like.new_empty(shape)[:rows] for _ in range(2)]
        wanted = (shape, like.dtype)
        room = current_workspace_manager().get_simultaneous(wanted, wanted)
        return [tensor[:rows] for tensor in room]


class PagedBackend(AttentionBackend):
    """The answers of the backend that are the same for every version of vLLM."""

    forward_includes_kv_cache_update = False
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[QtoolAttention]:
        return QtoolAttention

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [TOKENS]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return takes_head_dim(head_size)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8


def head_rows(kv_cache: Tensor) -> Tensor:
    """uint8 ``[N, H, bytes of a head]`` of a layer's cache ``[N, H, ...]``, the same memory."""
    return kv_cache.view(torch.uint8).view(*kv_cache.shape[:2], -1)


def gather_room(config: VllmConfig) -> int:
    """Number of rows that hold any one sequence, or the new tokens of any step."""
    step = config.scheduler_config.max_num_batched_tokens
    return max(config.model_config.max_model_len, step)
