"""Round the columns of a weight one after another, each making up for the errors of the others.

For a target ``W [N, K]`` and its rounded ``V``, with errors ``E = W - V`` and a feedback ``M [K, K]``:

    v_k = nearest(w_k + sum_j e_j M[j, k])

- GPTQ (arXiv 2210.17323) in the form of LDLQ (arXiv 2307.13304, theorem 6: the same codes, one
  Cholesky and no inverse): ``H = R R^T``, R upper triangular, ``M = R diag(R)^-1 - I``; only the
  columns before k count.
- Coordinate descent: ``M = H diag(H)^-1 - I``; each code is the best one given all the others.

Legend: N output channels, K input channels, G groups, b columns of a block.
"""

import torch
from torch import Tensor

from qtool.calibration import columns_triton
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
        weight: the target ``[N, K]``, float32.
        error: ``[N, K]``: zeros before the first pass; in place, the errors of the new codes.
        feedback: ``M [K, K]``.
        grid: of the groups, each field ``[N, G]``.
        group: the group of each column ``[K]``.
        causal: ``M`` is strictly upper (GPTQ's): a column hears only of those before it.
        keep: bool ``[N, K]``, False where the value must be zero (pruned); None: dense.

    Returns:
        Codes ``[N, K]``, integral, in weight's dtype or, on a GPU, int16.
    """
    if columns_triton.runs_on(weight):
        return columns_triton.sweep(weight, error, feedback, grid, group, causal=causal, keep=keep, block=block)
    codes = torch.empty_like(weight)
    for start in range(0, weight.shape[1], block):
        columns = slice(start, start + block)
        heard = slice(0, start) if causal else slice(None)
        target = torch.addmm(weight[:, columns], error[:, heard], feedback[heard, columns])
        of = group[columns]
        inner = Grid(*(bound[:, of] for bound in (grid.step, grid.offset, grid.low, grid.high)))
        kept = None if keep is None else keep[:, columns]
        codes[:, columns], error[:, columns] = round_block_torch(
            target, weight[:, columns], error[:, columns], feedback[columns, columns], inner, kept
        )
    return codes


def round_block_torch(
    target: Tensor, weight: Tensor, error: Tensor, feedback: Tensor, grid: Grid, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Codes and errors ``[N, b]`` of one block; every field of ``grid`` is ``[N, b]`` here.

    Works on the transposes: a column is then contiguous.
    """
    target, weight, error = (t.T.contiguous() for t in (target, weight, error))  # [b, N]
    step, offset, low, high = (t.T.contiguous() for t in (grid.step, grid.offset, grid.low, grid.high))
    codes, errors = torch.empty_like(target), torch.empty_like(target)
    for k in range(len(target)):
        wanted = target[k] if keep is None else torch.where(keep[:, k], target[k], 0.0)
        codes[k] = torch.round((wanted - offset[k]) / step[k]).clamp(low[k], high[k])
        errors[k] = weight[k] - (codes[k] * step[k] + offset[k])
        target[k + 1 :].addr_(feedback[k, k + 1 :], errors[k] - error[k])
    return codes.T, errors.T
