"""Matrix products of which a row does not depend on how many rows there are.

A GPU's library chooses its algorithm by the shape, and with it the order of a sum. With as many
rows at a time as fill the GPU the shape is the same whether one rank has all rows or each of
several has a share in whole units.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: rows of a product, and the unit in which ranks share rows
ROWS = 512


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` for ``a [N, K]`` and ``b [K, L]``."""
    return by_rows(lambda part: part @ b, a)


def together(tensors: Sequence[Tensor]) -> Tensor:
    """``[E, ...]`` of E tensors of one shape; of one without a copy."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def by_rows(function: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    """``function`` of ``a [N, K]``, whose rows do not depend on each other; on a GPU a unit of rows
    at a time.
    """
    if not a.is_cuda or len(a) <= ROWS:
        return function(a)
    first, *rest = a.split(ROWS)
    start = function(first)
    out = start.new_empty(len(a), *start.shape[1:])
    out[:ROWS] = start
    for number, part in enumerate(rest, 1):
        out[number * ROWS : number * ROWS + len(part)] = function(part)
    return out
