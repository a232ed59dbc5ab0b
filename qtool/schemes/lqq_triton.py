"""LiquidQuant weights rounded and dequantized at once on a GPU: the weight is read once, the result written once.

The arithmetic is that of ``LiquidQuant.dequantize(LiquidQuant.quantize(w))``, step by step.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

#: elements of one program
TILE = 2048

if find_spec("triton"):
    import triton
    import triton.language as tl

    #: 1.5 * 2**23: adding it leaves no fraction bits, rounded half to even
    MAGIC = tl.constexpr(12582912.0)

    @triton.jit
    def _fake(  # type: ignore[no-untyped-def]
        weight_ptr, s1_ptr, s2_ptr, offset_ptr, out_ptr, count,
        SIZE: tl.constexpr, GROUPS: tl.constexpr, LESS: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        inside = at < count
        weight = tl.load(weight_ptr + at, inside, 0.0).to(tl.float32)
        group = at // SIZE
        s1 = tl.load(s1_ptr + group // GROUPS, inside, 1.0).to(tl.float32)
        s2 = tl.load(s2_ptr + group, inside, 1).to(tl.float32)
        low = tl.load(offset_ptr + group, inside, 128).to(tl.float32) - 128.0
        q8 = tl.minimum(tl.maximum((tl.div_rn(weight, s1) + MAGIC) - MAGIC, -119.0), 119.0)
        q4 = tl.minimum(tl.maximum((tl.div_rn(q8 - low, s2) + MAGIC) - MAGIC, 0.0), 15.0)
        value = (q4 * s2 + low) * s1
        tl.store(out_ptr + at, value - weight if LESS else value, inside)


def runs_on(weight: Tensor) -> bool:
    """Whether the fused kernel can take ``weight``; without triton a GPU uses torch's operations."""
    return weight.is_cuda and find_spec("triton") is not None


def fake(weight: Tensor, s1: Tensor, s2: Tensor, offset: Tensor, less: bool) -> Tensor:
    """The rounded ``weight [N, K]`` in float32, ``less`` the weight itself if asked."""
    weight, n, k = weight.contiguous(), *weight.shape
    out = torch.empty(n, k, dtype=torch.float32, device=weight.device)
    inputs, groups = [t.contiguous() for t in (s1, s2, offset)], s2.shape[1]
    _fake[(triton.cdiv(n * k, TILE),)](
        weight, *inputs, out, n * k, SIZE=k // groups, GROUPS=groups, LESS=less, TILE=TILE
    )
    return out
