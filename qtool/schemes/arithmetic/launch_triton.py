"""When and how this package's Triton kernels are launched."""

from importlib.util import find_spec
from threading import Lock
from typing import Any

import torch
from torch import Tensor

_LAUNCHING = Lock()


def triton_runs_on(tensor: Tensor) -> bool:
    """Whether Triton kernels run where ``tensor`` is; otherwise torch's operations do."""
    return tensor.is_cuda and find_spec("triton") is not None


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *rest: Any, **options: Any) -> None:
    """Run a ``grid`` of programs of ``kernel`` on the GPU that holds its argument ``first``.

    Triton itself would run them on the current GPU, which is GPU 0 in a new thread, and threads
    whose first launches fall together would each compile the kernel.
    """
    with _LAUNCHING, torch.cuda.device(first.device):
        kernel[grid](first, *rest, **options)
