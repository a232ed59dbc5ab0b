"""Matrix products whose rows and precision do not depend on the hardware's choices.

A GPU's library chooses an algorithm, and so the order of a sum, by the shape. :func:`product`
therefore multiplies a fixed number of rows at a time, enough to fill the GPU, so that a row is the
same whether one rank has all rows or several ranks share them. Tensor cores multiply float32 with
mantissas of 10 bits: :func:`tensor_cores` allows that, and :func:`precise_matmul` reaches more
precision with three such products.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

#: rows of a product, and the unit in which ranks share rows
ROWS = 512
#: columns of a product's second operand that are split into high and low parts at a time
COLUMNS = 4096


def product(a: Tensor, b: Tensor) -> Tensor:
    """``a b`` for ``a [N, K]`` and ``b [K, L]`` float32, each row independent of the others.

    On a GPU it is as precise as :func:`precise_matmul`.
    """
    if not a.is_cuda:
        return a @ b
    panels = [by_rows(partial(_of_halves, b=halves(part)), a) for part in b.split(COLUMNS, 1)]
    return panels[0] if len(panels) == 1 else torch.cat(panels, 1)


def coarse_product(a: Tensor, b: Tensor) -> Tensor:
    """As :func:`product`, but a GPU rounds the operands to TF32: each term is 3e-4 off.

    It takes a third of the time, and serves sums of errors, which only move what is rounded next.
    """
    with tensor_cores():
        return by_rows(lambda rows: rows @ b, a)


def by_rows(function: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    """``function`` of the rows of ``a [N, K]``; on a GPU :data:`ROWS` rows at a time."""
    if not a.is_cuda or len(a) <= ROWS:
        return function(a)
    first, *rest = a.split(ROWS)
    start = function(first)
    out = start.new_empty(len(a), *start.shape[1:])
    out[:ROWS] = start
    for number, part in enumerate(rest, 1):
        out[number * ROWS : number * ROWS + len(part)] = function(part)
    return out


@contextmanager
def tensor_cores() -> Iterator[None]:
    """While open, float32 products on CUDA round their operands to TF32; sums stay float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def precise_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a [N, K] @ b [K, M]`` as ``a_h b_h + a_h b_l + a_l b_h`` of high and low parts.

    Its relative error is 6e-7 at K = 3000 (H200; float32 has 2e-7, TF32 3e-4). That is enough to
    compare errors, not to factor a matrix.
    """
    return _of_halves(a, halves(b))


def _of_halves(a: Tensor, b: tuple[Tensor, Tensor]) -> Tensor:
    (a_high, a_low), (b_high, b_low) = halves(a), b
    with tensor_cores():
        return torch.addmm(torch.addmm(a_high @ b_low, a_low, b_high), a_high, b_high)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` float32 as the sum of a part that TF32 holds and the rest.

    The rest has up to 13 significant bits, of which TF32 holds the first 11.
    """
    high = (x.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return high, x - high
