"""Round the columns of a weight one after another, each making up for the errors of the others.

For a target ``W [N, K]`` and its rounded ``V``, with errors ``E = W - V`` and a feedback ``M [K,
K]``:

    v_k = nearest(w_k + sum_j e_j M[j, k])

- GPTQ (arXiv 2210.17323) in the form of LDLQ (arXiv 2307.13304, theorem 6: the same codes, one
  Cholesky and no inverse): ``H = R R^T``, R upper triangular, ``M = R diag(R)^-1 - I``; only the
  columns before k count.
- Coordinate descent: ``M = H diag(H)^-1 - I``; each code is the best one given all the others.

Problems of one shape (experts) go through it together: a column is a few small operations, most of
whose time is not work. Each gets the codes that it gets alone, to the bit.

Legend: E problems, N output channels, K input channels, G groups, b columns of a block.
"""

import torch
from torch import Tensor

from qtool.calibration.rounding.gptq import columns_triton
from qtool.calibration.rounding.gptq.row_products import together
from qtool.schemes.base import Grid


def descent_feedback(hessian: Tensor) -> Tensor:
    """``H diag(H)^-1 - I [K, K]``: the feedback of coordinate descent."""
    return (hessian / hessian.diagonal()).fill_diagonal_(0)


def sweep(
    weight: Tensor,
    error: Tensor,
    feedback: Tensor,
    grid: Grid,
    group: Tensor,
    *,
    causal: bool = False,
    keep: Tensor | None = None,
    block: int = 128,
) -> Tensor:
    """One pass over the columns, ``block`` of them at a time.

    Args:
        weight: the targets ``[E, N, K]``, float32.
        error: ``[E, N, K]``: zeros before the first pass; in place, the errors of the new codes.
        feedback: ``M [E, K, K]``.
        grid: of the groups, each field ``[E, N, G]``.
        group: the group of each column ``[E, K]``.
        causal: ``M`` is strictly upper (GPTQ's): a column hears only of those before it.
        keep: bool ``[E, N, K]``, False where the value must be zero (pruned); None: dense.

    Of one problem all of them may lack the first dimension, as the result then does.

    Returns:
        Codes ``[E, N, K]``, integral, in weight's dtype or, on a GPU, int16.
    """
    if weight.dim() == 2:
        one = Grid(grid.step[None], grid.offset[None], grid.low[None], grid.high[None])
        kept, own = (
            None if keep is None else keep[None],
            (weight[None], error[None], feedback[None], one, group[None]),
        )
        return sweep(*own, causal=causal, keep=kept, block=block)[0]
    if columns_triton.runs_on(weight):
        return columns_triton.sweep(
            weight, error, feedback, grid, group, causal=causal, keep=keep, block=block
        )
    codes = torch.empty_like(weight)
    fields = (grid.step, grid.offset, grid.low, grid.high)
    for start in range(0, weight.shape[2], block):
        columns = slice(start, start + block)
        heard = slice(0, start) if causal else slice(None)
        target = torch.empty_like(weight[:, :, columns])
        for one, own, its_error, m in zip(
            target, weight, error, feedback, strict=True
        ):  # a batched product may differ
            torch.addmm(own[:, columns], its_error[:, heard], m[heard, columns], out=one)
        of = group[:, columns]
        inner = Grid(
            *(together([one[:, at] for one, at in zip(field, of, strict=True)]) for field in fields)
        )
        kept = None if keep is None else keep[:, :, columns]
        codes[:, :, columns], error[:, :, columns] = round_block_torch(
            target,
            weight[:, :, columns],
            error[:, :, columns],
            feedback[:, columns, columns],
            inner,
            kept,
        )
    return codes


def round_block_torch(
    target: Tensor, weight: Tensor, error: Tensor, feedback: Tensor, grid: Grid, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and errors ``[E, N, b]`` of one block; every field of ``grid`` is ``[E, N, b]`` here.

    Works on the transposes: a column is then contiguous.
    """
    target, weight, error = (
        t.permute(2, 0, 1).contiguous() for t in (target, weight, error)
    )  # [b, E, N]
    fields = (grid.step, grid.offset, grid.low, grid.high)
    step, offset, low, high = (t.permute(2, 0, 1).contiguous() for t in fields)
    codes, errors = torch.empty_like(target), torch.empty_like(target)
    for k in range(len(target)):
        wanted = target[k] if keep is None else torch.where(keep[:, :, k], target[k], 0.0)
        codes[k] = torch.round((wanted - offset[k]) / step[k]).clamp(low[k], high[k])
        errors[k] = weight[k] - (codes[k] * step[k] + offset[k])
        for e, change in enumerate(errors[k] - error[k]):
            target[k + 1 :, e].addr_(feedback[e, k, k + 1 :], change)
    return codes.permute(1, 2, 0), errors.permute(1, 2, 0)
