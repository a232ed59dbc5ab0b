"""How this package's Triton kernels are launched."""

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *rest: Any, **options: Any) -> None:
    """Run a ``grid`` of programs of ``kernel`` on the GPU that holds its argument ``first``.

    Triton itself would run them on the current GPU, which is GPU 0 in a new thread.
    """
    with torch.cuda.device(first.device):
        kernel[grid](first, *rest, **options)
