"""SparseGPT: which weights of every ``m`` consecutive inputs stay, when the others make up for the
rest.

Frantar and Alistarh 2023 (arXiv 2301.00774), section 3.3. The columns are visited as in GPTQ, m at
a time; at the first of them the ``n`` with the largest ``t_k^2 D_k`` stay, ``D = diag(R)^2`` of ``H
= R R^T`` being what an error in column k costs once all later columns have made up for it. The
later columns then get the feedback of the pruned ones. Only the mask is the result: GPTQ and
coordinate descent round the kept weights of the original target, so pruning and rounding errors are
made up for together.

Legend: N output channels, K input channels, b columns of a block.
"""

import torch
from torch import Tensor


def prune(
    target: Tensor, feedback: Tensor, cost: Tensor, sparsity: tuple[int, int], block: int = 128
) -> Tensor:
    """The mask ``[N, K]`` of the weights that stay.

    Args:
        target: ``[N, K]``, in the order of the visit, in which every m columns belong together.
        feedback: GPTQ's ``[K, K]``.
        cost: ``D [K]``.
        sparsity: ``(n, m)``: n of m stay.
        block: columns at a time, a multiple of m.
    """
    n, m = sparsity
    keep, error = torch.zeros_like(target, dtype=torch.bool), torch.zeros_like(target)
    for start in range(0, target.shape[1], block):
        columns = slice(start, start + block)
        wanted = torch.addmm(target[:, columns], error, feedback[:, columns])  # [N, b]
        inner = feedback[columns, columns]
        for k in range(0, wanted.shape[1], m):
            few = slice(k, k + m)
            score = wanted[:, few].square() * cost[columns][few]
            keep[:, columns][:, few].scatter_(1, score.topk(n, 1).indices, True)
            for j in range(k, k + m):
                column = start + j
                value = torch.where(keep[:, column], wanted[:, j], 0.0)
                error[:, column] = target[:, column] - value
                wanted[:, j + 1 :].addr_(error[:, column], inner[j, j + 1 :])
    return keep
