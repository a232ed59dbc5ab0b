"""Uninitialized tensors for the results of kernels."""

from typing import Any

import torch
from torch import Tensor

#: Inductor's allocators take a third of the time of ``Tensor.new_empty``, on the current device
inductor: Any = torch._C._dynamo.guards


def new_empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized vector or contiguous matrix on the device of ``like``."""
    # a fake tensor is of a class of its own
    if type(like) is Tensor and like.is_cuda and like.get_device() == torch._C._cuda_getDevice():
        return inductor._empty_strided_cuda(shape, (*shape[1:], 1), dtype)
    return like.new_empty(shape, dtype=dtype)
