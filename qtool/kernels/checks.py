"""Argument checks that the ops share; each refusal is one sentence."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.dtypes import NUMBERS

#: the tensor, its shape (``None``: it must be absent), the dtypes it may have
Expected = tuple[Tensor | None, tuple[int, ...] | None, tuple[torch.dtype, ...]]


def require_tensors(op: str, device: torch.device, expected: Mapping[str, Expected]) -> None:
    """Refuse tensors that are missing, of another shape, dtype or device, strided or misaligned."""
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None and shape is None:
            continue
        if tensor is None:
            raise QtoolError(f"{op}: {name} is missing; expected shape {shape}")
        if shape is None:
            raise QtoolError(f"{op}: {name} is given, but nothing here reads it; pass None")
        if tuple(tensor.shape) != shape:
            raise QtoolError(f"{op}: {name} has shape {tuple(tensor.shape)}; expected {shape}")
        if tensor.dtype not in dtypes:
            raise QtoolError(
                f"{op}: {name} is {tensor.dtype}; expected {' or '.join(map(str, dtypes))}"
            )
        if tensor.device != device:
            raise QtoolError(
                f"{op}: {name} is on {tensor.device}, the first tensor on {device}; all must be on "
                "one device"
            )
        if not tensor.is_contiguous():
            raise QtoolError(f"{op}: {name} has strides {tensor.stride()}; it must be contiguous")
        if tensor.dim() > 1:
            require_aligned(op, name, tensor)


def optional(
    tensor: Tensor | None, shape: tuple[int, ...] | None, dtypes: tuple[torch.dtype, ...]
) -> Expected:
    """What is expected of a ``tensor`` that may be absent."""
    return tensor, None if tensor is None else shape, dtypes


def require_aligned(op: str, name: str, tensor: Tensor) -> None:
    """Refuse a tensor on a GPU of which a kernel could not read 16 bytes at once."""
    offset = tensor.storage_offset()
    if tensor.device.type == "cuda" and offset * tensor.element_size() % 16:
        raise QtoolError(
            f"{op}: {name} starts at storage offset {offset}; it must be 16-byte aligned"
        )


def require_out_dtype(
    op: str, dtype: torch.dtype, accepted: Collection[torch.dtype] = tuple(NUMBERS)
) -> None:
    """Refuse an output dtype that is not ``accepted``, by default those of the integer GEMMs."""
    if dtype not in accepted:
        raise QtoolError(f"{op}: out_dtype is {dtype}; accepted: {', '.join(map(str, accepted))}")
