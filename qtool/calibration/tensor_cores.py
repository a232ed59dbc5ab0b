"""Float32 products on a GPU's tensor cores, where a mantissa of 10 bits is enough."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def tensor_cores() -> Iterator[None]:
    """While open, float32 matrix products on CUDA round their operands to TF32 (sums stay float32)."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
