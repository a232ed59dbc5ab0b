"""The range of each group on a GPU, in one pass over the weight."""

from importlib.util import find_spec

import torch
from torch import Tensor

from qtool.schemes.arithmetic.launch_triton import launch

#: weights that one program holds at a time
ELEMENTS = 2048

if find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def _range(  # type: ignore[no-untyped-def]
        weight_ptr, low_ptr, high_ptr, count, size, MANY: tl.constexpr, SIZE: tl.constexpr
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)  # n * G + group
        there = at < count
        low, high = (
            tl.full([MANY], float("inf"), tl.float32),
            tl.full([MANY], float("-inf"), tl.float32),
        )
        bad = tl.zeros([MANY], tl.float32)  # NaN as soon as a weight is NaN or Inf
        for start in range(0, size, SIZE):
            column = (start + tl.arange(0, SIZE))[None, :]
            inside = there[:, None] & (column < size)
            weight = tl.load(weight_ptr + at[:, None] * size + column, inside, 0.0).to(tl.float32)
            low = tl.minimum(low, tl.min(tl.where(inside, weight, float("inf")), 1))
            high = tl.maximum(high, tl.max(tl.where(inside, weight, float("-inf")), 1))
            bad += tl.sum(weight * 0.0, 1)
        tl.store(low_ptr + at, low + bad, there)
        tl.store(high_ptr + at, high + bad, there)


def group_range(groups: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and largest ``[N, G]`` float32 of ``groups [N, G, g]``.

    NaN where a group holds NaN or Inf.
    """
    n, count, size = groups.shape
    low = torch.empty(n, count, dtype=torch.float32, device=groups.device)
    high = torch.empty_like(low)
    block = min(ELEMENTS, triton.next_power_of_2(size))
    many = ELEMENTS // block
    programs, groups = triton.cdiv(n * count, many), groups.contiguous()
    launch(_range, (programs,), groups, low, high, n * count, size, MANY=many, SIZE=block)
    return low, high
