"""SparseGPT: which n of each m consecutive inputs stay when a weight is pruned.

Frantar and Alistarh 2023 (arXiv 2301.00774), section 3.3. The columns are visited as in GPTQ, m at
a time. Of each m the n weights with the largest ``t_k^2 R_kk^2`` stay, and the later columns then
get the errors of the pruned ones. ``t_k`` is the weight after it has made up for the errors of all
columns before it, as if none of its m were pruned; ``R_kk^2``, of the factor R of H, is what an
error costs once all later columns have made up for it.

Legend: N output channels, K input channels, b columns of a panel.
"""

import torch
from torch import Tensor

from qtool.calibration.rounding.gptq.columns import PANEL


def prune(target: Tensor, feedback: Tensor, cost: Tensor, sparsity: tuple[int, int]) -> Tensor:
    """The mask ``[N, K]`` of the weights that stay: n of each m consecutive inputs.

    Args:
        target: ``[N, K]``, in the order of the visit, in which each m columns are pruned together.
        feedback: GPTQ's ``[K, K]``.
        cost: ``R_kk^2 [K]``.
        sparsity: ``(n, m)``: n of m stay.
    """
    n, m = sparsity
    keep, error = torch.zeros_like(target, dtype=torch.bool), torch.zeros_like(target)
    for start in range(0, target.shape[1], PANEL):
        columns = slice(start, start + PANEL)
        wanted = torch.addmm(target[:, columns], error, feedback[:, columns])  # [N, b]
        inner = feedback[columns, columns]
        for k in range(0, wanted.shape[1], m):
            few = slice(k, k + m)
            free = wanted[:, few].clone()  # t: these columns if none of them is pruned
            for j in range(m - 1):
                moved = target[:, start + k + j] - free[:, j]
                free[:, j + 1 :].addr_(moved, inner[k + j, k + j + 1 : k + m])
            score = free.square() * cost[columns][few]
            keep[:, columns][:, few].scatter_(1, score.topk(n, 1).indices, True)
            for j in range(k, k + m):
                column = start + j
                value = torch.where(keep[:, column], wanted[:, j], 0.0)
                error[:, column] = target[:, column] - value
                wanted[:, j + 1 :].addr_(error[:, column], inner[j, j + 1 :])
    return keep
