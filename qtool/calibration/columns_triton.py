"""The columns of one block on a GPU, fused: rows in parallel, columns one after another in registers.

One program holds ``ROWS x b`` targets in registers. Column k is read out of the tile by a masked
sum, rounded, and its error added to the columns after it: ``b`` steps in one launch where torch
needs a dozen launches a column. The arithmetic is that of ``columns.round_block_torch``.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from qtool.schemes.base import Grid

ROWS = 16

if find_spec("triton"):
    import triton
    import triton.language as tl

    #: 1.5 * 2**23: adding it leaves no fraction bits, rounded half to even
    MAGIC = tl.constexpr(12582912.0)

    @triton.jit
    def _round_block(  # type: ignore[no-untyped-def]
        target_ptr, weight_ptr, error_ptr, feedback_ptr, step_ptr, offset_ptr, low_ptr, high_ptr, keep_ptr,
        codes_ptr, errors_ptr, n, b, SPARSE: tl.constexpr, ROWS: tl.constexpr, B: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, B)
        at = row[:, None] * b + column[None, :]
        inside = (row[:, None] < n) & (column[None, :] < b)
        target = tl.load(target_ptr + at, inside, 0.0)
        for k in range(b):
            one = row * b + k
            valid = row < n
            wanted = tl.sum(tl.where(column[None, :] == k, target, 0.0), 1)
            if SPARSE:
                wanted = tl.where(tl.load(keep_ptr + one, valid, 0) != 0, wanted, 0.0)
            step, offset = tl.load(step_ptr + one, valid, 1.0), tl.load(offset_ptr + one, valid, 0.0)
            low, high = tl.load(low_ptr + one, valid, 0), tl.load(high_ptr + one, valid, 0)
            code = tl.div_rn(wanted - offset, step)
            code = tl.minimum(tl.maximum(code, low.to(tl.float32)), high.to(tl.float32))
            code = (code + MAGIC) - MAGIC
            error = tl.load(weight_ptr + one, valid, 0.0) - (code * step + offset)
            tl.store(codes_ptr + one, code, valid)
            tl.store(errors_ptr + one, error, valid)
            change = error - tl.load(error_ptr + one, valid, 0.0)
            after = tl.load(feedback_ptr + k * b + column, (column > k) & (column < b), 0.0)
            target += change[:, None] * after[None, :]


def runs_on(weight: Tensor) -> bool:
    """Whether the fused kernel can round ``weight``; without triton a GPU uses torch's operations."""
    return weight.is_cuda and weight.dtype == torch.float32 and find_spec("triton") is not None


def round_block(
    target: Tensor, weight: Tensor, error: Tensor, feedback: Tensor, grid: Grid, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and errors ``[N, b]``, see ``columns.round_block_torch``."""
    n, b = target.shape
    codes, errors = torch.empty_like(target), torch.empty_like(target)
    inputs = [t.contiguous() for t in (target, weight, error, feedback, grid.step, grid.offset, grid.low, grid.high)]
    kept = inputs[0] if keep is None else keep.to(torch.int8).contiguous()
    _round_block[(triton.cdiv(n, ROWS),)](
        *inputs, kept, codes, errors, n, b, SPARSE=keep is not None, ROWS=ROWS, B=triton.next_power_of_2(b)
    )
    return codes, errors
