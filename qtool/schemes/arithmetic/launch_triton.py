"""How this package's Triton kernels are launched."""

from typing import Any

import torch
from torch import Tensor


def launch(
    kernel: Any, programs: tuple[int, ...], first: Tensor, *rest: Any, **options: Any
) -> None:
    """Run ``programs`` programs of ``kernel(first, *rest)`` on the GPU that holds ``first``.

    Triton itself would run them on the current GPU, which is GPU 0 in a new thread.
    """
    with torch.cuda.device(first.device):
        kernel[programs](first, *rest, **options)
