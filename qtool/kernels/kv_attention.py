"""``qtool::kv_attention``: attention of a few query tokens a sequence over a packed kv4 or kv8 cache.

    out = softmax(scaling * q K'^T) V'      K', V' the values that the codes stand for (:mod:`qtool.schemes.kv`)

The sequence is split over the GPU; the parts are added in a fixed order, so equal calls give equal bits. Query t of Tq
stands at position ``length - Tq + t`` and sees the tokens up to itself. A query that sees nothing gives zeros.

Legend: B batch, Hq query and H kv heads, C capacity, Tq queries a sequence, D head dimension.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import Build, cubin
from qtool.kernels.checks import require_tensors
from qtool.kernels.launch import launch, load
from qtool.kernels.packed_cache import DTYPES, PackedCache, require_lengths

WARPS = 4
MOST_SPLITS = 64


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
        k_codes, v_codes: kv4 uint8 ``[B, H, C, D/2]``, kv8 int8 ``[B, H, C, D]``; C a multiple of 64.
        k_scale, v_scale: kv4 float16 ``[B, H, C, 1]``, kv8 float32 ``[H, D]``.
        k_zero, v_zero: kv4 float16 ``[B, H, C, 1]``, kv8 None.
        tokens: of every sequence, or the most of any if there are ``lengths``.
        lengths: int32 ``[B]`` tokens of each sequence, or None.
        mask: bool ``[B, Tq, M]``, False hides, and so are tokens from M on; or None.
        scaling: of the scores. softcap: scores become ``softcap * tanh(score / softcap)``; 0: they do not.
        window: a query sees only its last ``window`` tokens, itself included; 0: all.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or number of tokens; one sentence.
    """
    call = _require(
        query, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, tokens, lengths, mask, scaling, softcap, window
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
def _(
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
    call = _require(
        query, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, tokens, lengths, mask, scaling, softcap, window
    )
    (batch, heads, queries, dim), device = query.shape, query.device
    out = torch.empty_like(query)
    if out.numel() == 0:
        return out
    kv_heads, rows = call.keys.codes.shape[1], heads // call.keys.codes.shape[1] * queries
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise QtoolError(f"kv_attention: needs sm_80 or newer, {device} is sm_{major}{minor}")
        processors = _processors(device.index)
        plan = Plan.of(call.keys.bits, dim, rows, batch * kv_heads, processors)
        blocks = batch * kv_heads * plan.row_blocks(rows)
        splits = plan.splits(blocks, tokens, processors)
        all_rows = batch * kv_heads * rows
        partial = query.new_empty(all_rows * splits * (dim + 2) if splits > 1 else 0, dtype=torch.float32)
        tensors = (query, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, lengths, mask, out, partial)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        cache_sizes = (kv_heads, heads // kv_heads, queries, tokens, call.keys.capacity)
        work = (0 if mask is None else mask.shape[2], splits, plan.row_blocks(rows), window, all_rows)
        parameters = struct.pack("<11Q2f10i", *pointers, scaling, softcap, *cache_sizes, *work)
        arch = f"sm_{major}{minor}"
        source = definition(plan, query.dtype, mask is not None, softcap > 0)
        attend, combine = _kernels(plan, source[2]["DTYPE"], mask is not None, softcap > 0, arch, device.index)
        launch(attend, blocks * splits, 32 * WARPS, plan.shared_bytes, parameters, device, overlap=major >= 9)
        if splits > 1:
            launch(combine, all_rows, max(32, dim), 0, parameters, device, overlap=major >= 9)
    return out


@kv_attention.register_fake
def _(
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
    _require(query, k_codes, k_scale, k_zero, v_codes, v_scale, v_zero, tokens, lengths, mask, scaling, softcap, window)
    return torch.empty_like(query)


@dataclass(frozen=True)
class Plan:
    """How one block is built: ``row_tiles`` tiles of 8 query rows, ``tile`` tokens a stage, ``stages`` in each ring."""

    bits: int
    dim: int
    row_tiles: int
    tile: int
    stages: int
    blocks_per_sm: int

    @classmethod
    def of(cls, bits: int, dim: int, rows: int, groups: int, processors: int) -> "Plan":
        """The measured choice for ``rows`` query rows of each of ``groups`` kv heads (of all sequences)."""
        row_tiles = 1 if rows <= 8 or dim > 128 else 2
        stages = 2 if bits == 4 else 3
        if bits == 4 and dim <= 128 and groups * -(-rows // (8 * row_tiles)) <= processors:
            return cls(bits, dim, row_tiles, 64, stages, 1)
        tile = 16 if bits * dim > 1024 else 32
        blocks = 2 if row_tiles == 2 or bits * dim > 512 else 4
        return cls(bits, dim, row_tiles, tile, stages, blocks)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: the rings, and later the exchange between warps."""
        stage = 2 * self.tile * self.dim * self.bits // 8 + (8 * self.tile if self.bits == 4 else 0)
        return max(WARPS * self.stages * stage, WARPS * 8 * self.row_tiles * (self.dim + 6) * 4)

    def row_blocks(self, rows: int) -> int:
        """Blocks that share a kv head's query rows."""
        return -(-rows // (8 * self.row_tiles))

    def splits(self, blocks: int, tokens: int, processors: int) -> int:
        """Into how many parts to cut the tokens: the fewest rounds of tiles, a split's own cost counted as two."""
        rounds = -(-tokens // (self.tile * WARPS))
        room = processors * self.blocks_per_sm

        def cost(splits: int) -> tuple[int, int]:
            waves = -(-blocks * splits // room)
            return waves * (-(-rounds // splits) + 2), splits

        return min(range(1, max(1, min(rounds, MOST_SPLITS)) + 1), key=cost)


def definition(plan: Plan, dtype: torch.dtype, masked: bool, capped: bool) -> tuple[str, str, dict[str, int]]:
    """Source name, prologue and macros of one kernel."""
    defines = {"BITS": plan.bits, "DIM": plan.dim, "ROW_TILES": plan.row_tiles, "TILE": plan.tile}
    defines |= {
        "STAGES": plan.stages,
        "WARPS": WARPS,
        "MOST_SPLITS": MOST_SPLITS,
        "MIN_BLOCKS": plan.blocks_per_sm,
        "DTYPE": DTYPES[dtype],
    }
    return "kv_attention", "", defines | {"MASKED": int(masked), "CAPPED": int(capped)}


def builds() -> Iterator[Build]:
    """Both caches at few and many query rows: every width on Hopper, the longest variant everywhere."""
    cases = [("sm_90a", dim, False, 1000) for dim in (64, 80, 128, 256)]
    cases += [(arch, 128, True, groups) for arch in ("sm_80", "sm_89", "sm_90a") for groups in (1, 1000)]
    for (arch, dim, special, groups), bits, rows in product(cases, (4, 8), (4, 16)):
        plan = Plan.of(bits, dim, rows, groups, 132)
        if bits == 8 and groups == 1:
            continue  # the same as for many
        name = f"kv_attention kv{bits} D={dim} rows={rows} tile={plan.tile}{' masked capped' * special}"
        source = definition(plan, torch.bfloat16, special, special)
        threads = 32 * WARPS * plan.blocks_per_sm
        exits = arch != "sm_90a"  # a loop's exit is coded as a call there
        yield Build(name, arch, source, threads, ("HMMA.16816.F32",), calls=exits)


@cache
def _kernels(plan: Plan, dtype: int, masked: bool, capped: bool, arch: str, device: int) -> tuple[Any, Any]:
    wanted = next(d for d, number in DTYPES.items() if number == dtype)
    code = cubin(*definition(plan, wanted, masked, capped), arch)
    return load(code, "kv_attention", plan.shared_bytes, device), load(code, "kv_combine", 0, device)


@cache
def _processors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@dataclass(frozen=True)
class _Call:
    keys: PackedCache
    values: PackedCache


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
    require_tensors(op, query.device, {"query": (query, tuple(query.shape), (torch.float16, torch.bfloat16))})
    call = _Call(PackedCache(op, k_codes, k_scale, k_zero, "k_"), PackedCache(op, v_codes, v_scale, v_zero, "v_"))
    kv_heads = k_codes.shape[1] if k_codes.dim() == 4 else 0
    if kv_heads == 0 or heads % kv_heads:
        raise QtoolError(f"{op}: {heads} query heads over {kv_heads} kv heads; expected a multiple")
    for part in (call.keys, call.values):
        part.require(batch, kv_heads, dim, query.device)
    if (k_codes.dtype, k_codes.shape) != (v_codes.dtype, v_codes.shape):
        raise QtoolError(
            f"{op}: keys are {k_codes.dtype} {tuple(k_codes.shape)}, values {v_codes.dtype} {tuple(v_codes.shape)}; "
            "both must be packed alike"
        )
    if not 0 <= tokens <= call.keys.capacity:
        raise QtoolError(f"{op}: {tokens} tokens; the cache has room for {call.keys.capacity}")
    require_lengths(op, lengths, batch, query.device)
    if mask is not None:
        seen = mask.shape[2] if mask.dim() == 3 else 0
        require_tensors(op, query.device, {"mask": (mask, (batch, queries, seen), (torch.bool,))})
    if softcap < 0 or window < 0:
        raise QtoolError(f"{op}: softcap {softcap} and window {window}; expected 0 (none) or more")
    return call


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
    ends = torch.full((batch,), tokens, device=device) if lengths is None else lengths.clamp(0, tokens)
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
