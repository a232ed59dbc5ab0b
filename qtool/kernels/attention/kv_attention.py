"""``qtool::kv_attention``: attention of a few queries per sequence over a packed cache.

    out = softmax(scaling * q K'^T) V'

K' and V' are the values that the codes stand for (:mod:`qtool.schemes.kv`).

The sequence is split over the GPU; the parts are added in a fixed order, so equal calls give equal
bits. Query t of Tq stands at position ``length - Tq + t`` and sees the tokens up to itself. A query
that sees nothing gives zeros.

Legend: B batch, Hq query and H kv heads, C capacity, Tq queries a sequence, D head dimension.
"""

import struct
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.attention.kv_plan import WARPS, Plan, definition
from qtool.kernels.attention.packed_cache import PackedCache
from qtool.kernels.build import cubin
from qtool.kernels.checks import optional, require_tensors
from qtool.kernels.dtypes import HALF
from qtool.kernels.launch import launch, load, multiprocessors, pointers, require_ampere
from qtool.kernels.op import operator

OP = "kv_attention"
#: csrc/attention/kv_params.cuh
PARAMETERS = struct.Struct("<13Q2q2f12i")


class KvAttention(NamedTuple):
    """``[B, Hq, Tq, D]`` in the query's dtype.

    Args:
        query: float16 or bfloat16 ``[B, Hq, Tq, D]``; Hq a multiple of H, D of 16, up to 256.
        k_codes: kv4 uint8 ``[B, H, C, D/2]``, kv8 int8 ``[B, H, C, D]``; C a multiple of 64.
        v_codes: as ``k_codes``.
        k_scale: kv4 float16 ``[B, H, C, 1]``, kv8 float32 ``[H, D]``.
        v_scale: as ``k_scale``.
        k_zero: kv4 float16 ``[B, H, C, 1]``, kv8 None.
        v_zero: as ``k_zero``.
        tokens: tokens of every sequence, or the most of any if there are ``lengths``.
        lengths: int32 ``[B]`` tokens of each sequence, or None.
        mask: bool ``[B, Tq, M]`` or None; False hides a token, and tokens from M on are hidden too.
        scaling: factor of the scores.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0: no cap.
        window: a query sees only its last ``window`` tokens, itself included; 0: all.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or number of tokens; one sentence.
    """

    query: Tensor
    k_codes: Tensor
    k_scale: Tensor
    k_zero: Tensor | None
    v_codes: Tensor
    v_scale: Tensor
    v_zero: Tensor | None
    tokens: int
    lengths: Tensor | None
    mask: Tensor | None
    scaling: float
    softcap: float
    window: int

    @property
    def keys(self) -> PackedCache:
        return PackedCache(OP, self.k_codes, self.k_scale, self.k_zero, "k_")

    @property
    def values(self) -> PackedCache:
        return PackedCache(OP, self.v_codes, self.v_scale, self.v_zero, "v_")

    def require(self) -> None:
        query, mask, keys = self.query, self.mask, self.keys
        if query.dim() != 4:
            raise QtoolError(f"{OP}: query is {query.dim()}-D; expected [B, Hq, Tq, D]")
        (batch, heads, queries, dim), device = query.shape, query.device
        require_tensors(OP, device, {"query": (query, tuple(query.shape), HALF)})
        kv_heads = self.k_codes.shape[1] if self.k_codes.dim() == 4 else 0
        require_scores(OP, heads, kv_heads, self.softcap, self.window)
        for part in (keys, self.values):
            part.require(batch, kv_heads, dim, device)
        k, v = self.k_codes, self.v_codes
        if (k.dtype, k.shape) != (v.dtype, v.shape):
            raise QtoolError(
                f"{OP}: keys are {k.dtype} {tuple(k.shape)}, values {v.dtype} {tuple(v.shape)}; "
                "both must be packed alike"
            )
        if not 0 <= self.tokens <= keys.capacity:
            raise QtoolError(f"{OP}: {self.tokens} tokens; the cache has room for {keys.capacity}")
        last = 0 if mask is None else mask.shape[-1:].numel()
        expected = {
            "lengths": optional(self.lengths, (batch,), (torch.int32,)),
            "mask": optional(mask, (batch, queries, last), (torch.bool,)),
        }
        require_tensors(OP, device, expected)

    def empty(self) -> Tensor:
        return torch.empty_like(self.query)

    def reference(self) -> Tensor:
        return self.attended(None)

    def attended(self, k_offset: Tensor | None) -> Tensor:
        """The attention over keys plus ``k_offset [H, D]``."""
        query, tokens = self.query, self.tokens
        keys, values = (part.dequantize()[:, :, :tokens] for part in (self.keys, self.values))
        if k_offset is not None:
            keys = keys + k_offset[:, None]
        batch, heads, queries, dim = query.shape
        grouped = query.float().unflatten(1, (keys.shape[1], -1))  # [B, H, group, Tq, D]
        scores = grouped @ keys.unsqueeze(2).transpose(3, 4) * self.scaling  # [..., Tq, tokens]
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        hidden = ~_seen(self)[:, None, None]
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        weights = weights.masked_fill(hidden, 0.0)
        out = weights @ values.unsqueeze(2)
        return out.reshape(batch, heads, queries, dim).to(query.dtype)

    def launch(self, out: Tensor) -> None:
        query, keys, values, mask = self.query, self.keys, self.values, self.mask
        (batch, heads, queries, dim), device = query.shape, query.device
        if out.numel() == 0:
            return
        kv_heads = self.k_codes.shape[1]
        rows = heads // kv_heads * queries
        plan = Plan.of(keys.bits, dim, rows)
        splits = plan.splits(
            batch * kv_heads * plan.row_blocks(rows), self.tokens, multiprocessors(device)
        )
        attend(
            *(query, plan, splits, self.scaling, self.softcap, self.window),
            parts=(keys.codes, keys.scale, keys.zero, values.codes, values.scale, values.zero),
            lengths=self.lengths,
            out=out,
            kv_heads=kv_heads,
            tokens=self.tokens,
            capacity=keys.capacity,
            mask=mask,
        )


kv_attention = operator(OP, KvAttention)


def require_scores(op: str, heads: int, kv_heads: int, softcap: float, window: int) -> None:
    """Refuse query heads that do not share kv heads evenly, and a cap or window below 0."""
    if kv_heads == 0 or heads % kv_heads:
        raise QtoolError(f"{op}: {heads} query heads over {kv_heads} kv heads; expected a multiple")
    if softcap < 0 or window < 0:
        raise QtoolError(f"{op}: softcap {softcap} and window {window}; expected 0 (none) or more")


def attend(
    query: Tensor,
    plan: Plan,
    splits: int,
    scaling: float,
    softcap: float,
    window: int,
    *,
    parts: tuple[Tensor | None, ...],
    lengths: Tensor | None,
    out: Tensor,
    kv_heads: int,
    tokens: int,
    capacity: int,
    mask: Tensor | None = None,
    table: Tensor | None = None,
    page_bytes: int = 0,
    min_splits: int = 0,
    shift: Tensor | None = None,
) -> None:
    """Launch the kernels for dense or paged attention (csrc/attention/kv_params.cuh).

    Args:
        query: ``[B, Hq, Tq, D]``, contiguous but for the distance between sequences.
        parts: codes, scales and zero points of keys, then of values; paged: the pages first.
        table: paged: int32 ``[B, M]``, the pages of each sequence.
        page_bytes: paged: see :mod:`qtool.kernels.attention.paged_cache`.
        min_splits: paged: the least number of splits.
        shift: float32 ``[B, Hq, Tq]``, added to all scores of a row before the cap.
    """
    (batch, heads, queries, dim), device = query.shape, query.device
    arch, overlap = require_ampere(OP, device)
    group, all_rows = heads // kv_heads, batch * heads * queries
    row_blocks = plan.row_blocks(group * queries)
    size = all_rows * splits * (dim + 2) if splits > 1 else 0
    sums = query.new_empty(size, dtype=torch.float32)  # of each split
    parameters = PARAMETERS.pack(
        *pointers(query, *parts, lengths, mask, out, sums, table, shift),
        *(query.stride(0), page_bytes, scaling, softcap),
        *(kv_heads, group, queries, tokens, capacity),
        *(0 if mask is None else mask.shape[2], splits, row_blocks, window, all_rows),
        *(0 if table is None else table.stride(0), min_splits),
    )
    variant = (plan, query.dtype, mask is not None, softcap > 0, table is not None)
    main, combine = _kernels(*variant, arch, device.index)
    start = partial(launch, device=device, overlap=overlap)
    blocks = batch * kv_heads * row_blocks
    start(main, blocks * splits, 32 * WARPS, plan.shared_bytes, parameters)
    if splits > 1:
        start(combine, all_rows, max(32, dim), 0, parameters)


@cache
def _kernels(
    plan: Plan, dtype: torch.dtype, masked: bool, capped: bool, paged: bool, arch: str, device: int
) -> tuple[int, int]:
    code = cubin(*definition(plan, dtype, masked, capped, paged), arch)
    attend = load(code, "kv_attention", plan.shared_bytes, device)
    return attend, load(code, "kv_combine", 0, device)


def _seen(call: KvAttention) -> Tensor:
    """Which of its sequence's tokens each query sees, bool ``[B, Tq, tokens]``."""
    batch, _, queries, _ = call.query.shape
    tokens, mask, window, device = call.tokens, call.mask, call.window, call.query.device
    if call.lengths is None:
        ends = torch.full((batch,), tokens, device=device)
    else:
        ends = call.lengths.clamp(0, tokens)
    position = (ends[:, None] - queries + torch.arange(queries, device=device))[:, :, None]
    token = torch.arange(tokens, device=device)
    seen = token <= position
    if window:
        seen &= token > position - window
    if mask is not None:
        shown = torch.zeros_like(seen)
        width = min(tokens, mask.shape[2])
        shown[:, :, :width] = mask[:, :, :width]
        seen &= shown
    return seen
