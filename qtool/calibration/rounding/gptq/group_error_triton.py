"""The weighted rounding error of all groups on a GPU, in one pass over the weight.

The arithmetic is that of ``clip_search.group_error``; sums are added in another order.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from qtool.schemes.arithmetic.grid import Grid
from qtool.schemes.arithmetic.launch_triton import launch

#: weights that one program holds at a time
ELEMENTS = 1024

if find_spec("triton"):
    import triton
    import triton.language as tl

    from qtool.schemes.arithmetic.round_triton import MAGIC

    @triton.jit
    def _group_error(  # type: ignore[no-untyped-def]
        weight_ptr,
        importance_ptr,
        step_ptr,
        offset_ptr,
        low_ptr,
        high_ptr,
        error_ptr,
        groups,
        size,
        own,
        each,
        count,
        MANY: tl.constexpr,
        SIZE: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)  # n * G + group
        there, group = at < count, at % groups
        step, offset = (
            tl.load(step_ptr + at, there, 1.0)[:, None],
            tl.load(offset_ptr + at, there, 0.0)[:, None],
        )
        low = tl.load(low_ptr + at, there, 0).to(tl.float32)[:, None]
        high = tl.load(high_ptr + at, there, 0).to(tl.float32)[:, None]
        importance_ptr += ((at % own) // each * groups + group)[:, None] * size
        total = tl.zeros([MANY, SIZE], tl.float32)
        for start in range(0, size, SIZE):
            column = (start + tl.arange(0, SIZE))[None, :]
            inside = there[:, None] & (column < size)
            weight = tl.load(weight_ptr + (at % own)[:, None] * size + column, inside, 0.0)
            code = tl.minimum(tl.maximum(tl.div_rn(weight - offset, step), low), high)
            lost = ((code + MAGIC) - MAGIC) * step + offset - weight
            worth = tl.load(importance_ptr + column, inside, 0.0)
            total += tl.where(inside, lost * lost, 0.0) * worth
        tl.store(error_ptr + at, tl.sum(total, 1), there)


def group_error(groups: Tensor, importance: Tensor, grid: Grid) -> Tensor:
    """``clip_search.group_error`` ``[C E N, G]`` of C candidates, for grids of C E N rows."""
    n, count, size = len(grid.step), *groups.shape[1:]
    inputs = [
        t.contiguous() for t in (groups, importance, grid.step, grid.offset, grid.low, grid.high)
    ]
    error = torch.empty(n, count, device=groups.device)
    block = min(ELEMENTS, triton.next_power_of_2(size))
    many, own = ELEMENTS // block, len(groups) * count
    each = own // len(importance)
    programs = triton.cdiv(n * count, many)
    sizes = (count, size, own, each, n * count)
    launch(_group_error, (programs,), *inputs, error, *sizes, MANY=many, SIZE=block)
    return error
