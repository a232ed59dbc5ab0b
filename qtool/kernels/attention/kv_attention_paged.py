"""``qtool::kv_attention_paged``: :mod:`qtool.kernels.attention.kv_attention` over pages.

The arguments' shapes and ``tokens`` alone decide how the work is cut; lengths and the table are
read on the GPU. So a captured graph may be replayed with other values in the same tensors.

Legend: B sequences, Hq query and H kv heads, D head dimension, M pages a sequence.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.attention.kv_append import aligned
from qtool.kernels.attention.kv_attention import KvAttention, attend, require_scores
from qtool.kernels.attention.kv_plan import Plan
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.kernels.attention.paged_cache import PagedCache, require_table, require_tokens
from qtool.kernels.checks import Expected, optional, require_tensors
from qtool.kernels.launch import multiprocessors
from qtool.kernels.op import operator

OP = "kv_attention_paged"


class KvAttentionPaged(NamedTuple):
    """Write the attention of one query per sequence, its last token, to ``out``.

    ``scaling``, ``softcap`` and ``window`` are those of ``kv_attention``.

    Args:
        query: float16 or bfloat16 ``[B, Hq, D]``; tokens may lie apart.
        pages: uint8 ``[N, H, head_bytes]``.
        table: int32 ``[B, M]``, the pages of each sequence; rows may lie apart.
        lengths: int32 ``[B]`` tokens of each sequence, the query's included; 0 gives zeros.
        k_scale: kv8: float32 ``[H, D]``, of keys; kv4: None.
        v_scale: kv8: float32 ``[H, D]``, of values; kv4: None.
        k_offset: kv4: float32 ``[H, D]`` that the keys' codes leave out, or None: nothing. It adds
            one number to all scores of a query, so it matters only for a soft cap.
        out: ``[B, Hq, D]`` in the query's dtype.
        tokens: the most of any sequence, now and in replays.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or number of tokens; one sentence.
    """

    query: Tensor
    pages: Tensor
    table: Tensor
    lengths: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_offset: Tensor | None
    out: Tensor
    tokens: int
    scaling: float
    softcap: float
    window: int

    @property
    def cache(self) -> PagedCache:
        return PagedCache(OP, self.pages, self.query.shape[2], self.k_scale, self.v_scale)

    def require(self) -> None:
        query, device = self.query, self.query.device
        require_tokens(OP, "query", query)
        batch, heads, dim = query.shape
        if query.stride(1) != dim:
            raise QtoolError(
                f"{OP}: query has strides {query.stride()}; its heads must be adjacent"
            )
        kv_heads = self.pages.shape[1] if self.pages.dim() == 3 else 0
        require_scores(OP, heads, kv_heads, self.softcap, self.window)
        self.cache.require(kv_heads, device)
        require_table(OP, self.table, batch, device)
        expected: dict[str, Expected] = {
            "lengths": (self.lengths, (batch,), (torch.int32,)),
            "out": (self.out, (batch, heads, dim), (query.dtype,)),
            "k_offset": optional(self.k_offset, (kv_heads, dim), (torch.float32,)),
        }
        require_tensors(OP, device, expected)
        room = self.table.shape[1] * TOKENS
        if not 0 <= self.tokens <= room:
            raise QtoolError(f"{OP}: {self.tokens} tokens; the table has room for {room}")

    def empty(self) -> None:
        return None

    def reference(self) -> None:
        keys, values = self.cache.dense(self.table)
        parts = (keys.codes, keys.scale, keys.zero, values.codes, values.scale, values.zero)
        dense = KvAttention(
            self.query.unsqueeze(2).contiguous(),
            *parts,  # type: ignore[arg-type]
            *(self.tokens, self.lengths, None, self.scaling, self.softcap, self.window),
        )
        self.out.copy_(dense.attended(self.k_offset)[:, :, 0])

    def launch(self, out: None) -> None:
        query, pages = aligned(self.query), self.pages
        (batch, heads, dim), device = query.shape, query.device
        if self.out.numel() == 0:
            return
        kv_heads = pages.shape[1]
        group = heads // kv_heads
        plan = Plan.of(self.cache.bits, dim, group)
        blocks = batch * kv_heads * plan.row_blocks(group)
        min_splits, splits = plan.paged_splits(blocks, self.tokens, multiprocessors(device))
        shift = None
        if self.softcap and self.k_offset is not None:
            grouped = query.float().unflatten(1, (kv_heads, group))
            shift = (grouped @ self.k_offset.unsqueeze(2) * self.scaling).contiguous()
        attend(
            *(query.unsqueeze(2), plan, splits, self.scaling, self.softcap, self.window),
            parts=(pages, self.k_scale, None, None, self.v_scale, None),
            lengths=self.lengths,
            out=self.out,
            kv_heads=kv_heads,
            tokens=self.tokens,
            capacity=0,
            table=self.table,
            page_bytes=pages.stride(0),
            min_splits=min_splits,
            shift=shift,
        )


kv_attention_paged = operator(OP, KvAttentionPaged, mutates=("out",))
