"""Float32 products on a GPU's tensor cores, which multiply mantissas of 10 bits: rounded to them,
or in three parts.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


@contextmanager
def tensor_cores() -> Iterator[None]:
    """While open, float32 matrix products on CUDA round their operands to TF32 (sums stay float32)."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def precise_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a [N, K] @ b [K, M]`` as ``a_h b_h + a_h b_l + a_l b_h`` of high and low parts.

    Off by 6e-7 at K = 3000 (H200; float32 by 2e-7, TF32 by 3e-4): good to compare errors by, not to
    factor a matrix.
    """
    (a_high, a_low), (b_high, b_low) = halves(a), halves(b)
    with tensor_cores():
        return torch.addmm(torch.addmm(a_high @ b_low, a_low, b_high), a_high, b_high)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` float32 as the sum of a part that TF32 holds and the rest, whose 13 bits it holds but
    for the last.
    """
    high = (x.view(torch.int32) & -(1 << 13)).view(torch.float32)
    return high, x - high
