"""``qtool::kv_attention``: attention of a few query tokens a sequence over a packed kv4 or kv8
cache.

    out = softmax(scaling * q K'^T) V'      K', V' the values that the codes stand for (:mod:`qtool.schemes.kv`)

The sequence is split over the GPU; the parts are added in a fixed order, so equal calls give equal
bits. Query t of Tq stands at position ``length - Tq + t`` and sees the tokens up to itself. A query
that sees nothing gives zeros.

Legend: B batch, Hq query and H kv heads, C capacity, Tq queries a sequence, D head dimension.
"""

import struct
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.attention.kv_plan import WARPS, Plan, definition
from qtool.kernels.attention.packed_cache import PackedCache, require_lengths
from qtool.kernels.build import cubin
from qtool.kernels.checks import require_tensors
from qtool.kernels.launch import launch, load


@torch.library.custom_op("qtool::kv_attention", mutates_args=())
def kv_attention(
    query: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_zero: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    v_zero: Tensor | None,
    tokens: int,
    lengths: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
    window: int,
) -> Tensor:
    """``[B, Hq, Tq, D]`` in the query's dtype.

    Args:
        query: float16 or bfloat16 ``[B, Hq, Tq, D]``; Hq a multiple of H, D of 16, up to 256.
        k_codes, v_codes: kv4 uint8 ``[B, H, C, D/2]``, kv8 int8 ``[B, H, C, D]``; C a multiple of
            64.
        k_scale, v_scale: kv4 float16 ``[B, H, C, 1]``, kv8 float32 ``[H, D]``.
        k_zero, v_zero: kv4 float16 ``[B, H, C, 1]``, kv8 None.
        tokens: of every sequence, or the most of any if there are ``lengths``.
        lengths: int32 ``[B]`` tokens of each sequence, or None.
        mask: bool ``[B, Tq, M]``, False hides, and so are tokens from M on; or None.
        scaling: of the scores. softcap: scores become ``softcap * tanh(score / softcap)``; 0: they
            do not.
        window: a query sees only its last ``window`` tokens, itself included; 0: all.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or number of tokens; one sentence.
    """
    call = _require(
        query,
        k_codes,
        k_scale,
        k_zero,
        v_codes,
        v_scale,
        v_zero,
        tokens,
        lengths,
        mask,
        scaling,
        softcap,
        window,
    )
    keys, values = (part.dequantize()[:, :, :tokens] for part in (call.keys, call.values))
    batch, heads, queries, dim = query.shape
    grouped = query.float().unflatten(1, (keys.shape[1], -1))  # [B, H, group, Tq, D]
    scores = grouped @ keys.unsqueeze(2).transpose(3, 4) * scaling  # [B, H, group, Tq, tokens]
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = _seen(batch, queries, tokens, lengths, mask, window, query.device)[:, None, None]
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1).masked_fill(~seen, 0.0)
    return (weights @ values.unsqueeze(2)).reshape(batch, heads, queries, dim).to(query.dtype)


@kv_attention.register_kernel("cuda")
def _(query: Tensor, *how: Any) -> Tensor:
    call = _require(query, *how)
    (batch, heads, queries, dim), device = query.shape, query.device
    out = torch.empty_like(query)
    if out.numel() == 0:
        return out
    kv_heads = call.keys.codes.shape[1]
    rows, masked, capped = heads // kv_heads * queries, call.mask is not None, call.softcap > 0
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise QtoolError(f"kv_attention: needs sm_80 or newer, {device} is sm_{major}{minor}")
        plan = Plan.of(call.keys.bits, dim, rows)
        blocks = batch * kv_heads * plan.row_blocks(rows)
        splits = plan.splits(blocks, call.tokens, _processors(device.index))
        all_rows = batch * kv_heads * rows
        partial = query.new_empty(
            all_rows * splits * (dim + 2) if splits > 1 else 0, dtype=torch.float32
        )
        parts = (
            part
            for side in (call.keys, call.values)
            for part in (side.codes, side.scale, side.zero)
        )
        tensors = (query, *parts, call.lengths, call.mask, out, partial)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        cached = (kv_heads, heads // kv_heads, queries, call.tokens, call.keys.capacity)
        mask_tokens = 0 if call.mask is None else call.mask.shape[2]
        work = (mask_tokens, splits, plan.row_blocks(rows), call.window, all_rows)
        parameters = struct.pack("<11Q2f10i", *pointers, call.scaling, call.softcap, *cached, *work)
        attend, combine = _kernels(
            plan, query.dtype, masked, capped, f"sm_{major}{minor}", device.index
        )
        launch(
            attend,
            blocks * splits,
            32 * WARPS,
            plan.shared_bytes,
            parameters,
            device,
            overlap=major >= 9,
        )
        if splits > 1:
            launch(combine, all_rows, max(32, dim), 0, parameters, device, overlap=major >= 9)
    return out


@kv_attention.register_fake
def _(query: Tensor, *how: Any) -> Tensor:
    _require(query, *how)
    return torch.empty_like(query)


@cache
def _kernels(
    plan: Plan, dtype: torch.dtype, masked: bool, capped: bool, arch: str, device: int
) -> tuple[Any, Any]:
    code = cubin(*definition(plan, dtype, masked, capped), arch)
    return load(code, "kv_attention", plan.shared_bytes, device), load(
        code, "kv_combine", 0, device
    )


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class _Call:
    """The arguments, checked."""

    keys: PackedCache
    values: PackedCache
    tokens: int
    lengths: Tensor | None
    mask: Tensor | None
    scaling: float
    softcap: float
    window: int


def _require(
    query: Tensor,
    k_codes: Tensor,
    k_scale: Tensor,
    k_zero: Tensor | None,
    v_codes: Tensor,
    v_scale: Tensor,
    v_zero: Tensor | None,
    tokens: int,
    lengths: Tensor | None,
    mask: Tensor | None,
    scaling: float,
    softcap: float,
    window: int,
) -> _Call:
    op = "kv_attention"
    if query.dim() != 4:
        raise QtoolError(f"{op}: query is {query.dim()}-D; expected [B, Hq, Tq, D]")
    batch, heads, queries, dim = query.shape
    require_tensors(
        op, query.device, {"query": (query, tuple(query.shape), (torch.float16, torch.bfloat16))}
    )
    keys, values = (
        PackedCache(op, k_codes, k_scale, k_zero, "k_"),
        PackedCache(op, v_codes, v_scale, v_zero, "v_"),
    )
    kv_heads = k_codes.shape[1] if k_codes.dim() == 4 else 0
    if kv_heads == 0 or heads % kv_heads:
        raise QtoolError(f"{op}: {heads} query heads over {kv_heads} kv heads; expected a multiple")
    for part in (keys, values):
        part.require(batch, kv_heads, dim, query.device)
    if (k_codes.dtype, k_codes.shape) != (v_codes.dtype, v_codes.shape):
        raise QtoolError(
            f"{op}: keys are {k_codes.dtype} {tuple(k_codes.shape)}, values {v_codes.dtype} {tuple(v_codes.shape)}; "
            "both must be packed alike"
        )
    if not 0 <= tokens <= keys.capacity:
        raise QtoolError(f"{op}: {tokens} tokens; the cache has room for {keys.capacity}")
    require_lengths(op, lengths, batch, query.device)
    if mask is not None:
        seen = mask.shape[2] if mask.dim() == 3 else 0
        require_tensors(op, query.device, {"mask": (mask, (batch, queries, seen), (torch.bool,))})
    if softcap < 0 or window < 0:
        raise QtoolError(f"{op}: softcap {softcap} and window {window}; expected 0 (none) or more")
    return _Call(keys, values, tokens, lengths, mask, scaling, softcap, window)


def _seen(
    batch: int,
    queries: int,
    tokens: int,
    lengths: Tensor | None,
    mask: Tensor | None,
    window: int,
    device: torch.device,
) -> Tensor:
    """Which of its sequence's tokens each query sees, bool ``[B, Tq, tokens]``."""
    ends = (
        torch.full((batch,), tokens, device=device) if lengths is None else lengths.clamp(0, tokens)
    )
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
