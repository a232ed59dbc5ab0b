"""The straight-through estimator on a GPU: one kernel forward, one backward.

The formulas are in :mod:`qtool.calibration.rounding.distill.learned_linear`.

The arithmetic is that of the torch operations there; sums over a group are added in another order.
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
    def _through(  # type: ignore[no-untyped-def]
        steps_ptr,
        keep_ptr,
        gradient_ptr,
        unit_ptr,
        step_ptr,
        offset_ptr,
        low_ptr,
        high_ptr,
        out_ptr,
        gain_ptr,
        shift_ptr,
        size,
        count,
        MANY: tl.constexpr,
        SIZE: tl.constexpr,
        BACK: tl.constexpr,
        KEEP: tl.constexpr,
    ):
        at = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)  # n * G + group
        there = at < count
        unit = tl.load(unit_ptr + at, there, 1.0)[:, None]
        step, offset = (
            tl.load(step_ptr + at, there, 1.0)[:, None],
            tl.load(offset_ptr + at, there, 0.0)[:, None],
        )
        low = tl.load(low_ptr + at, there, 0).to(tl.float32)[:, None]
        high = tl.load(high_ptr + at, there, 0).to(tl.float32)[:, None]
        lowest, highest = (low - 0.5) * step + offset, (high + 0.5) * step + offset
        gain, shift = tl.zeros([MANY, SIZE], tl.float32), tl.zeros([MANY, SIZE], tl.float32)
        for start in range(0, size, SIZE):
            column = (start + tl.arange(0, SIZE))[None, :]
            place, inside = at[:, None] * size + column, there[:, None] & (column < size)
            weight = tl.load(steps_ptr + place, inside, 0.0) * unit
            code = tl.minimum(tl.maximum(tl.div_rn(weight - offset, step), low), high)
            value = ((code + MAGIC) - MAGIC) * step + offset
            if BACK:
                gradient = tl.load(gradient_ptr + place, inside, 0.0).to(tl.float32)
                learns = (weight >= lowest) & (weight <= highest)
                if KEEP:
                    learns &= tl.load(keep_ptr + place, inside, 0) != 0
                passed = tl.where(learns, gradient, 0.0)
                tl.store(out_ptr + place, passed * unit, inside)
                gain += tl.where(inside, gradient * value - passed * weight, 0.0)
                shift += tl.where(inside, gradient - passed, 0.0)
            else:
                tl.store(out_ptr + place, value, inside)
        if BACK:
            tl.store(gain_ptr + at, tl.sum(gain, 1), there)
            tl.store(shift_ptr + at, tl.sum(shift, 1), there)


def value(steps: Tensor, step: Tensor, grid: Grid, dtype: torch.dtype) -> Tensor:
    """The values in ``dtype`` nearest to a weight on ``grid``.

    The weight is ``steps [N, G, g]`` times ``step [N, G, 1]``, float32.
    """
    out = torch.empty_like(steps, dtype=dtype)
    _launch(steps, step, None, steps, grid, out, steps, steps, back=False)
    return out


def gradients(
    steps: Tensor, step: Tensor, keep: Tensor | None, gradient: Tensor, grid: Grid
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of steps, gain and shift from the ``gradient [N, G, g]`` of the values.

    The gradients of gain and shift are ``[N, G]``.
    """
    out = torch.empty_like(steps)
    gain, shift = steps.new_empty(steps.shape[:2]), steps.new_empty(steps.shape[:2])
    _launch(steps, step, keep, gradient.contiguous(), grid, out, gain, shift, back=True)
    return out, gain, shift


def _launch(
    steps: Tensor,
    step: Tensor,
    keep: Tensor | None,
    gradient: Tensor,
    grid: Grid,
    out: Tensor,
    gain: Tensor,
    shift: Tensor,
    *,
    back: bool,
) -> None:
    n, groups, size = steps.shape
    of_groups = [
        t.expand(n, groups).contiguous()
        for t in (step.squeeze(-1), grid.step, grid.offset, grid.low, grid.high)
    ]
    block = min(ELEMENTS, triton.next_power_of_2(size))
    many = ELEMENTS // block
    kept = steps if keep is None else keep.view(torch.uint8)
    launch(
        _through,
        (triton.cdiv(n * groups, many),),
        steps,
        kept,
        gradient,
        *of_groups,
        out,
        gain,
        shift,
        size,
        n * groups,
        MANY=many,
        SIZE=block,
        BACK=back,
        KEEP=keep is not None,
        enable_fp_fusion=False,
    )
