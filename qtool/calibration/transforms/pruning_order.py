"""An order of the input channels in which n:m pruning loses little importance.

Channel permutations (Pool and Yu, 2021, Channel Permutations for N:M Sparsity, section 4): two
channels of two groups of m are swapped if pruning then leaves out less importance. The importance
of a weight is Wanda's score squared (Sun et al., 2023, arXiv 2306.11695), ``w_k^2 mean(x_k^2)``.

Legend: M rows, K input channels, G = K / m groups.
"""

from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

#: about so many rows of a weight are evaluated: every n-th row
ROWS = 1024
#: number of rounds; in each, half of the groups try to swap one channel with the other half
ROUNDS = 300


@torch.no_grad()
def pruning_order(importance: Tensor, sparsity: tuple[int, int], rounds: int = ROUNDS) -> Tensor:
    """The order ``[K]`` of the channels of ``importance [M, K]``.

    Args:
        sparsity: ``(n, m)``: n of m channels stay.
    """
    n, m = sparsity
    device, half = importance.device, importance.shape[1] // m // 2
    random = torch.Generator().manual_seed(0)
    groups = importance.T.unflatten(0, (-1, m)).transpose(0, 1).contiguous()  # [m, G, M]
    order = torch.arange(importance.shape[1], device=device).view(-1, m).T.contiguous()  # [m, G]
    least = left_out(groups, n)
    for _ in range(rounds):
        pairs = torch.randperm(groups.shape[1], generator=random)[: 2 * half].to(device)
        j, k = torch.randint(m, (2,), generator=random).tolist()
        one, other = pairs.view(2, -1)
        first, second = groups[:, one], groups[:, other]
        mine, theirs = first[j].clone(), second[k].clone()
        first[j], second[k] = theirs, mine
        found = left_out(first, n), left_out(second, n)
        better = found[0] + found[1] < least[one] + least[other]  # [G / 2]
        for own, new in zip((one, other), found, strict=True):
            least[own] = torch.where(better, new, least[own])
        groups[j, one] = torch.where(better[:, None], theirs, mine)
        groups[k, other] = torch.where(better[:, None], mine, theirs)
        mine, theirs = order[j, one], order[k, other]
        order[j, one] = torch.where(better, theirs, mine)
        order[k, other] = torch.where(better, mine, theirs)
    return order.T.flatten()


def left_out(groups: Tensor, n: int) -> Tensor:
    """The importance ``[G]`` that pruning leaves out of ``groups [m, G, M]``, over all rows.

    In each row it is the least sum of m - n channels.
    """
    some = combinations(groups, len(groups) - n)
    return reduce(torch.minimum, (reduce(torch.add, few) for few in some)).sum(-1)
