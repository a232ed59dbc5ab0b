"""The sweep of GPTQ and of coordinate descent: rounds the columns in turn, a panel at a time.

    v_k = nearest(t_k + sum_j e_j M_jk)

over the columns j before k, or over all but k: :mod:`.gptq` has the formulas of t, e and M.

Legend: E problems, N output channels, K input channels, G groups, b columns of a panel.
"""

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from qtool.calibration.rounding.gptq import columns_triton
from qtool.calibration.stacking import stack
from qtool.schemes.arithmetic.launch_triton import triton_runs_on
from qtool.schemes.base import Grid

#: columns rounded on a CPU before the rest of the weight gets their errors; changes speed only
PANEL = 128


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
    """One pass over the columns, a panel of them at a time.

    Args:
        weight: the targets ``[E, N, K]``, float32.
        error: ``[E, N, K]``: zeros before the first pass; in place, the errors of the new codes.
        feedback: ``M [E, K, K]``.
        grid: of the groups, each field ``[E, N, G]``.
        group: the group of each column ``[E, K]``.
        causal: ``M`` is strictly upper (GPTQ's): a column gets the errors of those before it only.
        keep: bool ``[E, N, K]``, False where the value must be zero (pruned); None: dense.

    Returns:
        Codes ``[E, N, K]``, integral, in weight's dtype or, on a GPU, int16.
    """
    if triton_runs_on(weight):
        return columns_triton.sweep(weight, error, feedback, grid, group, causal=causal, keep=keep)
    codes = torch.empty_like(weight)
    for start in range(0, weight.shape[2], PANEL):
        columns = slice(start, start + PANEL)
        before = slice(0, start) if causal else slice(None)
        target = torch.empty_like(weight[:, :, columns])
        # one by one: a batched product may add in another order
        for one, own, its_error, m in zip(target, weight, error, feedback, strict=True):
            torch.addmm(own[:, columns], its_error[:, before], m[before, columns], out=one)
        groups = group[:, columns]
        by_column = (
            stack([one[:, at] for one, at in zip(getattr(grid, f.name), groups, strict=True)])
            for f in fields(Grid)
        )
        codes[:, :, columns], error[:, :, columns] = round_panel(
            target,
            weight[:, :, columns],
            error[:, :, columns],
            feedback[:, columns, columns],
            Grid(*by_column),
            None if keep is None else keep[:, :, columns],
        )
    return codes


def round_panel(
    target: Tensor, weight: Tensor, error: Tensor, feedback: Tensor, grid: Grid, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and errors ``[E, N, b]`` of one panel; the fields of ``grid`` are ``[E, N, b]`` too.

    It works on transposes, in which a column is contiguous, and on differences from the grid's
    offsets. A column is a few small operations, which numpy starts faster than torch.
    """
    target, weight, error, step, offset, low, high = (
        t.permute(2, 0, 1).to(weight.dtype).contiguous()  # [b, E, N]
        for t in (target, weight, error, grid.step, grid.offset, grid.low, grid.high)
    )
    target, weight = target - offset, weight - offset
    feedback = feedback.permute(1, 2, 0)[..., None].contiguous()  # [b, b, E, 1]
    codes, errors = torch.empty_like(target), torch.empty_like(target)
    later, given = target.numpy(), (target, weight, error, step, low, high, codes, errors, feedback)
    for k, columns in enumerate(zip(*(t.numpy() for t in given), strict=True)):
        wanted, w, before, s, lo, hi, code, e, m = columns  # [E, N] each; m: [b, E, 1]
        if keep is not None:
            wanted = np.where(keep[:, :, k], wanted, -offset[k])
        np.rint(np.divide(wanted, s, out=code), out=code)
        np.clip(code, lo, hi, out=code)
        np.subtract(w, code * s, out=e)
        later[k + 1 :] += m[k + 1 :] * (e - before)
    return codes.permute(1, 2, 0), errors.permute(1, 2, 0)
