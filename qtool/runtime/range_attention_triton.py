"""Attention of one token per sequence over a range of keys, for enough sequences to fill a GPU.

A program holds the queries of one kv head of one sequence and reads its keys and values once, a
tile at a time, with an online softmax in float32. On an H200 it reads 4.2 TB/s where torch's flash
kernel reads 2.5: 128 sequences of 1900 tokens, 8 kv heads of 128 channels. A range is not split, so
few sequences would leave most of the GPU idle.

Legend: B sequences, Hq query and H kv heads, D channels a head.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from qtool.schemes.arithmetic.launch_triton import launch, triton_runs_on

#: elements of a tile of keys or of values, and the most tokens of a tile
TILE, TOKENS = 8192, 128
#: rows of the smallest tensor-core product, so the most query heads that may share a kv head
ROWS = 16

if find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def _attend(  # type: ignore[no-untyped-def]
        query_ptr,
        key_ptr,
        value_ptr,
        out_ptr,
        start_ptr,
        used_ptr,
        scale,
        heads,
        QUERIES: tl.constexpr,
        D: tl.constexpr,
        ROWS: tl.constexpr,
        TILE: tl.constexpr,
    ):
        sequence, head = tl.program_id(0) // heads, tl.program_id(0) % heads
        row, channel, token = tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, TILE)
        at = (tl.program_id(0) * QUERIES + row)[:, None] * D + channel[None, :]
        own = (row < QUERIES)[:, None]
        query = tl.load(query_ptr + at, own, 0.0)
        used = tl.load(used_ptr + sequence)
        first = tl.load(start_ptr + sequence).to(tl.int64) * heads + head
        key_ptr += first * D
        value_ptr += first * D
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        out = tl.zeros([ROWS, D], tl.float32)
        for start in range(0, used, TILE):
            inside = start + token < used
            tile = (start + token).to(tl.int64)[:, None] * heads * D + channel[None, :]
            score = tl.dot(query, tl.load(key_ptr + tile, inside[:, None], 0.0).T) * scale
            score = tl.where(inside[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            share, kept = tl.exp(score - higher[:, None]), tl.exp(top - higher)
            total = total * kept + tl.sum(share, 1)
            value = tl.load(value_ptr + tile, inside[:, None], 0.0)
            out = tl.dot(share.to(value.dtype), value, out * kept[:, None])
            top = higher
        tl.store(out_ptr + at, (out / total[:, None]).to(value_ptr.dtype.element_ty), own)


def runs_on(query: Tensor, key: Tensor) -> bool:
    """Whether the kernel takes ``query [B, Hq, D]`` and ``key [tokens, H, D]``, and fills the GPU.

    Otherwise a kernel that splits ranges is faster.
    """
    batch, queries, d = query.shape
    if not triton_runs_on(query):
        return False
    processors = torch.cuda.get_device_properties(query.device).multi_processor_count
    fills = batch * key.shape[1] >= processors
    return fills and queries <= ROWS * key.shape[1] and d >= 16 and not d & (d - 1)


def attend(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, used: Tensor, scaling: float | None
) -> Tensor:
    """``[B, Hq, D]``: attention of ``query [B, Hq, D]`` over a range of ``key`` and ``value``.

    Args:
        key: ``[tokens, H, D]`` of all sequences, contiguous.
        value: shaped as ``key``.
        starts: int32, the first token of each range.
        used: int32 ``[B]``, the number of tokens of each range.
        scaling: factor of the scores; None: ``1 / sqrt(D)``.
    """
    (batch, queries, d), heads = query.shape, key.shape[1]
    out = query.new_empty(batch, queries, d)
    launch(
        _attend,
        (batch * heads,),
        query.contiguous(),
        key,
        value,
        out,
        starts,
        used,
        d**-0.5 if scaling is None else scaling,
        heads,
        QUERIES=queries // heads,
        D=d,
        ROWS=ROWS,
        TILE=min(TOKENS, TILE // d),
        num_warps=4,
        num_stages=2,
    )
    return out
