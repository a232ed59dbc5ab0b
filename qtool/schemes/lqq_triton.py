"""LiquidQuant on a GPU in two fused kernels: fit parameters, round and dequantize.

The arithmetic is that of ``LiquidQuant.fit_range`` and
``LiquidQuant.dequantize(LiquidQuant.quantize(w))``, step by step as a CPU does it. Searches fit
thousands of candidates: some thirty launches each were most of their time.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from qtool.schemes.arithmetic.launch_triton import launch
from qtool.schemes.base import ClipRatio, Params, scale_bounds

#: elements of a row, and groups of a row, that a program handles at a time
TILE, FIT_TILE = 2048, 128

if find_spec("triton"):
    import triton
    import triton.language as tl

    from qtool.schemes.arithmetic.round_triton import MAGIC

    # one build for all shapes
    @triton.jit(do_not_specialize=["less"])
    def _fake(  # type: ignore[no-untyped-def]
        weight_ptr,
        s1_ptr,
        s2_ptr,
        offset_ptr,
        out_ptr,
        k,
        less,
        SIZE: tl.constexpr,
        TILE: tl.constexpr,
    ):
        row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)
        inside, at = column < k, row * k + column
        weight = tl.load(weight_ptr + at, inside, 0.0).to(tl.float32)
        s1 = tl.load(s1_ptr + row).to(tl.float32)
        group = row * (k // SIZE) + column // SIZE
        s2 = tl.load(s2_ptr + group, inside, 1).to(tl.float32)
        low = tl.load(offset_ptr + group, inside, 128).to(tl.float32) - 128.0
        q8 = tl.minimum(tl.maximum((tl.div_rn(weight, s1) + MAGIC) - MAGIC, -119.0), 119.0)
        q4 = tl.minimum(tl.maximum((tl.div_rn(q8 - low, s2) + MAGIC) - MAGIC, 0.0), 15.0)
        value = (q4 * s2 + low) * s1
        tl.store(out_ptr + at, tl.where(less != 0, value - weight, value), inside)

    # one build for all shapes and clips
    @triton.jit(do_not_specialize=["groups", "by_row", "by_group"])
    def _fit(  # type: ignore[no-untyped-def]
        low_ptr,
        high_ptr,
        clip_ptr,
        group_clip_ptr,
        s1_ptr,
        s2_ptr,
        offset_ptr,
        clip,
        group_clip,
        groups,
        by_row,
        by_group,
        least,
        most,
        TILE: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64)
        amax = 0.0
        for start in range(0, groups, TILE):
            group = start + tl.arange(0, TILE)
            at, inside = row * groups + group, group < groups
            low, high = tl.load(low_ptr + at, inside, 0.0), tl.load(high_ptr + at, inside, 0.0)
            amax = tl.maximum(amax, tl.max(tl.maximum(tl.abs(low), tl.abs(high)), 0))
        amax *= tl.load(clip_ptr + row, by_row != 0, clip)
        scale = tl.where(amax > 0, tl.div_rn(amax, 119.0), 1.0)
        stored = tl.minimum(tl.maximum(scale, least), most).to(s1_ptr.dtype.element_ty)
        tl.store(s1_ptr + row, stored)
        s1 = stored.to(tl.float32)
        for start in range(0, groups, TILE):
            group = start + tl.arange(0, TILE)
            at, inside = row * groups + group, group < groups
            low, high = tl.load(low_ptr + at, inside, 0.0), tl.load(high_ptr + at, inside, 0.0)
            ratio = tl.load(group_clip_ptr + at, inside & (by_group != 0), group_clip)
            low = tl.minimum(tl.maximum((tl.div_rn(low, s1) + MAGIC) - MAGIC, -119.0), 119.0)
            high = tl.minimum(tl.maximum((tl.div_rn(high, s1) + MAGIC) - MAGIC, -119.0), 119.0)
            low, high = (low * ratio + MAGIC) - MAGIC, (high * ratio + MAGIC) - MAGIC
            s2 = tl.minimum(tl.maximum((tl.div_rn(high - low, 15.0) + MAGIC) - MAGIC, 1.0), 16.0)
            tl.store(s2_ptr + at, s2.to(tl.uint8), inside)
            tl.store(offset_ptr + at, (low + 128.0).to(tl.uint8), inside)


def fit(
    low: Tensor, high: Tensor, clip: ClipRatio, group_clip: ClipRatio, dtype: torch.dtype
) -> Params:
    """The parameters of ranges ``[N, G]`` float32, with scales ``s1`` in ``dtype``."""
    n, groups = low.shape
    by_row, by_group = isinstance(clip, Tensor), isinstance(group_clip, Tensor)
    clips = clip.expand(n).float().contiguous() if isinstance(clip, Tensor) else low
    group_clips = (
        group_clip.expand(n, groups).float().contiguous() if isinstance(group_clip, Tensor) else low
    )
    s1, s2 = low.new_empty(n, dtype=dtype), low.new_empty(n, groups, dtype=torch.uint8)
    offset = torch.empty_like(s2)
    launch(
        _fit,
        (n,),
        low.contiguous(),
        high.contiguous(),
        clips,
        group_clips,
        s1,
        s2,
        offset,
        1.0 if by_row else clip,
        1.0 if by_group else group_clip,
        groups,
        int(by_row),
        int(by_group),
        *scale_bounds(dtype),
        TILE=FIT_TILE,
        enable_fp_fusion=False,
    )
    return {"s1": s1, "s2": s2, "offset": offset}


def fake(weight: Tensor, params: Params, *, less: bool) -> Tensor:
    """The rounded ``weight [N, K]``, or if ``less`` its difference to the weight, in float32."""
    weight, n, k = weight.contiguous(), *weight.shape
    out = torch.empty(n, k, dtype=torch.float32, device=weight.device)
    inputs = [params[name].contiguous() for name in ("s1", "s2", "offset")]
    launch(
        _fake,
        (n, triton.cdiv(k, TILE)),
        weight,
        *inputs,
        out,
        k,
        int(less),
        SIZE=k // params["s2"].shape[1],
        TILE=TILE,
        enable_fp_fusion=False,
    )
    return out
