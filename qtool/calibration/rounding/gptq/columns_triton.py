"""The sweep on a GPU: one fused kernel and one matrix product for each panel of columns.

The kernel rounds a panel. A program holds ``ROWS x b`` targets, and those of ``SUB`` columns a
second time. It rounds all of these columns in each step, of which one has its final target, and
adds what that column's error changed to the columns after it. So threads exchange nothing but sums
over ``SUB`` columns. A product and a sum are one ``fma`` wherever they meet, since the compiler may
fuse them or not, and its choice depends on the number of rows of a program.

The product then adds what the panel changed to all columns after it, ``T[:, later] += (E - E_old)
M[panel, later]``, so that a target is ready when its turn comes. It sums over ``b`` terms only, in
the same order for any number of rows, so that a row gets the same codes in any share of the rows.
Products round their operands to TF32: what an error adds to a target is 8e-4 off.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from qtool.calibration.precision import coarse_product, tensor_cores
from qtool.calibration.stacking import stack
from qtool.schemes.arithmetic.launch_triton import launch
from qtool.schemes.base import Grid

#: columns of a panel; if a weight has few rows, launches take longer than rounding 128 columns
PANEL = 256
#: rows of a program, one warp; many rows get larger programs
ROWS, MANY_ROWS, MANY = 8, 16, 16384
#: columns that are rounded in each step
SUB = 8
#: number of these columns whose code the compiler repeats; all eight take it four times as long
UNROLL = 2
#: least number of columns for which the library's product sums each row in the same order, whatever
#: the number of rows (of a panel's terms, on an H200; with 8 columns it does not)
WIDE = 128

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
        grid_ptr,
        group_ptr,
        keep_ptr,
        codes_ptr,
        change_ptr,
        n,
        columns,
        groups,
        fields,
        start,
        b,
        SPARSE: tl.constexpr,
        ROWS: tl.constexpr,
        B: tl.constexpr,
        SUB: tl.constexpr,
        UNROLL: tl.constexpr,
    ):
        problem = tl.program_id(1).to(tl.int64)
        own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        valid = own < n
        row = (problem * n + own)[:, None]  # index among the rows of all problems
        feedback_ptr += problem * columns * columns + start
        group_ptr += problem * columns + start
        every, few = tl.arange(0, B), tl.arange(0, SUB)
        mask = valid[:, None] & (every[None, :] < b)
        targets = tl.load(target_ptr + row * columns + start + every[None, :], mask, 0.0)
        for first in range(0, b, SUB):
            column = first + few
            inside = valid[:, None] & (column[None, :] < b)
            at = row * columns + start + column[None, :]
            of = row * groups + tl.load(group_ptr + column, column < b, 0)[None, :]
            step = tl.load(grid_ptr + of, inside, 1.0)
            offset = tl.load(grid_ptr + fields + of, inside, 0.0)
            low = tl.load(grid_ptr + 2 * fields + of, inside, 0.0)
            high = tl.load(grid_ptr + 3 * fields + of, inside, 0.0)
            inverse = tl.div_rn(1.0, step)
            centred = tl.load(weight_ptr + at, inside, 0.0) - offset
            old = tl.load(error_ptr + at, inside, 0.0)
            part = (tl.arange(0, B // SUB) == first // SUB)[None, :, None]
            target = tl.sum(tl.where(part, tl.reshape(targets, (ROWS, B // SUB, SUB)), 0.0), 1)
            target -= offset
            if SPARSE:
                pruned = tl.load(keep_ptr + at, inside, 0) == 0
            code, change = target, target
            for k in tl.range(SUB, loop_unroll_factor=UNROLL):
                wanted = target
                if SPARSE:
                    wanted = tl.where(pruned, -offset, target)
                code = tl.minimum(tl.maximum(wanted * inverse, low), high)
                code = (code + MAGIC) - MAGIC
                change = tl.fma(-code, step, centred - old)
                final = tl.sum(tl.where(few[None, :] == k, change, 0.0), 1)[:, None]
                line = feedback_ptr + (start + first + k).to(tl.int64) * columns
                real = first + k < b
                near = real & (few > k) & (column < b)
                behind = real & (every >= first + SUB) & (every < b)
                target = tl.fma(final, tl.load(line + column, near, 0.0)[None, :], target)
                targets = tl.fma(final, tl.load(line + every, behind, 0.0)[None, :], targets)
            tl.store(codes_ptr + at, code.to(tl.int16), inside)
            tl.store(error_ptr + at, tl.fma(-code, step, centred), inside)
            tl.store(change_ptr + row * B + column[None, :], change, inside)


@tensor_cores()
def sweep(
    weight: Tensor,
    error: Tensor,
    feedback: Tensor,
    grid: Grid,
    group: Tensor,
    *,
    causal: bool = False,
    keep: Tensor | None = None,
) -> Tensor:
    """``columns.sweep`` of contiguous ``error``; codes are int16."""
    problems, n, columns = weight.shape
    weight, feedback, group = weight.contiguous(), feedback.contiguous(), group.contiguous()
    alone = zip(weight, error, feedback, strict=True)
    target = (
        weight.clone() if causal else stack([coarse_product(e, m).add_(w) for w, e, m in alone])
    )
    codes, width = torch.empty_like(weight, dtype=torch.int16), triton.next_power_of_2(PANEL)
    change = weight.new_empty(problems, n, width)
    fields = torch.stack([grid.step, grid.offset, grid.low.float(), grid.high.float()])
    kept = weight if keep is None else keep.to(torch.int8).contiguous()
    rows = MANY_ROWS if problems * n >= MANY else ROWS
    for start in range(0, columns, PANEL):
        b = min(PANEL, columns - start)
        launch(
            _round_panel,
            (triton.cdiv(n, rows), problems),
            target,
            weight,
            error,
            feedback,
            fields,
            group,
            kept,
            codes,
            change,
            n,
            columns,
            fields.shape[-1],
            fields[0].numel(),
            start,
            b,
            SPARSE=keep is not None,
            ROWS=rows,
            B=width,
            SUB=min(SUB, width),
            UNROLL=UNROLL,
            num_warps=1,
        )
        later = slice(start + b, None)
        if start + b < columns:  # one product at a time: a batched one may add in another order
            for one, changed, m in zip(target, change, feedback, strict=True):
                _add_product(one[:, later], changed[:, :b], m[start : start + b, later])
    return codes


def _add_product(target: Tensor, change: Tensor, feedback: Tensor) -> None:
    """Add ``change feedback`` to ``target``."""
    if target.shape[1] < WIDE:
        target += coarse_product(change, feedback)
    else:
        target.addmm_(change, feedback)
