"""The sweep on a GPU: one fused kernel and one matrix product for each panel of columns.

The kernel rounds a panel: a program holds ``ROWS x b`` targets in registers, reads column k out of
the tile by a masked sum, rounds it and adds what its error changed to the columns after it. The
product then adds what the panel changed to all columns behind it, ``T[:, later] += (E - E_old)
M[panel, later]``, so that a target is ready when its turn comes. A product sums over ``b`` terms
only, in the same order for any number of rows, so that a row gets the same codes in any share of
the rows.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from qtool.calibration.precision import product, stack
from qtool.schemes.base import Grid

#: least number of rows, with the rows and the warps of a program for it: few rows get small
#: programs, to fill all multiprocessors
SIZES = ((8192, 32, 1), (4097, 16, 4), (0, 8, 4))

if find_spec("triton"):
    import triton
    import triton.language as tl

    from qtool.schemes.arithmetic.round_triton import MAGIC

    @triton.jit
    def _round_panel(  # type: ignore[no-untyped-def]
        target_ptr,
        weight_ptr,
        error_ptr,
        feedback_ptr,
        step_ptr,
        offset_ptr,
        low_ptr,
        high_ptr,
        group_ptr,
        keep_ptr,
        codes_ptr,
        change_ptr,
        n,
        columns,
        groups,
        start,
        b,
        SPARSE: tl.constexpr,
        ROWS: tl.constexpr,
        B: tl.constexpr,
    ):
        problem = tl.program_id(1).to(tl.int64)
        own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        valid = own < n
        row = problem * n + own  # index among the rows of all problems
        feedback_ptr += problem * columns * columns
        group_ptr += problem * columns
        column = tl.arange(0, B)
        inside = valid[:, None] & (column[None, :] < b)
        target = tl.load(target_ptr + row[:, None] * columns + start + column[None, :], inside, 0.0)
        for k in range(b):
            one = row * columns + start + k
            of = row * groups + tl.load(group_ptr + start + k)
            step, offset = tl.load(step_ptr + of, valid, 1.0), tl.load(offset_ptr + of, valid, 0.0)
            low, high = tl.load(low_ptr + of, valid, 0), tl.load(high_ptr + of, valid, 0)
            weight, old = (
                tl.load(weight_ptr + one, valid, 0.0),
                tl.load(error_ptr + one, valid, 0.0),
            )
            line = feedback_ptr + (start + k).to(tl.int64) * columns + start
            after = tl.load(line + column, (column > k) & (column < b), 0.0)
            wanted = tl.sum(tl.where(column[None, :] == k, target, 0.0), 1)
            if SPARSE:
                wanted = tl.where(tl.load(keep_ptr + one, valid, 0) != 0, wanted, 0.0)
            code = tl.div_rn(wanted - offset, step)
            code = tl.minimum(tl.maximum(code, low.to(tl.float32)), high.to(tl.float32))
            code = (code + MAGIC) - MAGIC
            error = weight - (code * step + offset)
            change = error - old
            tl.store(codes_ptr + one, code.to(tl.int16), valid)
            tl.store(error_ptr + one, error, valid)
            tl.store(change_ptr + row * B + k, change, valid)
            target += change[:, None] * after[None, :]


def runs_on(weight: Tensor) -> bool:
    """Whether the fused kernel can round ``weight``; without triton torch's operations run."""
    return weight.is_cuda and weight.dtype == torch.float32 and find_spec("triton") is not None


def sweep(
    weight: Tensor,
    error: Tensor,
    feedback: Tensor,
    grid: Grid,
    group: Tensor,
    *,
    causal: bool = False,
    keep: Tensor | None = None,
    panel: int = 128,
) -> Tensor:
    """``columns.sweep`` of contiguous ``error``; codes are int16."""
    problems, n, columns = weight.shape
    weight, feedback, group = weight.contiguous(), feedback.contiguous(), group.contiguous()
    alone = zip(weight, error, feedback, strict=True)
    target = weight.clone() if causal else stack([product(e, m).add_(w) for w, e, m in alone])
    codes, width = torch.empty_like(weight, dtype=torch.int16), triton.next_power_of_2(panel)
    change = weight.new_empty(problems, n, width)
    fields = [field.contiguous() for field in (grid.step, grid.offset, grid.low, grid.high)]
    kept = weight if keep is None else keep.to(torch.int8).contiguous()
    rows, warps = next(size for least, *size in SIZES if problems * n >= least)
    for start in range(0, columns, panel):
        b = min(panel, columns - start)
        _round_panel[(triton.cdiv(n, rows), problems)](
            target,
            weight,
            error,
            feedback,
            *fields,
            group,
            kept,
            codes,
            change,
            n,
            columns,
            fields[0].shape[2],
            start,
            b,
            SPARSE=keep is not None,
            ROWS=rows,
            B=width,
            num_warps=warps,
        )
        later = slice(start + b, None)
        if start + b < columns:  # one product at a time: a batched one may add in another order
            for one, changed, m in zip(target, change, feedback, strict=True):
                one[:, later].addmm_(changed[:, :b], m[start : start + b, later])
    return codes
