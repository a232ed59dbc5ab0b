"""Reads packed linears out of a native checkpoint, one at a time."""

import torch

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.format.stored_linears import linear_shape
from qtool.io.source import Checkpoint
from qtool.runtime.linear import QuantLinear


def load_linear(
    checkpoint: Checkpoint, name: str, linear_format: LinearFormat, device: torch.device
) -> QuantLinear:
    """The QuantLinear ``name`` of a native checkpoint.

    Raises:
        QtoolError: if a stored tensor does not have the declared shape and dtype.
    """
    n, k = linear_shape(checkpoint, name)
    permuted, bias = f"{name}.permutation" in checkpoint, f"{name}.bias" in checkpoint
    dtype = checkpoint.entry(f"{name}.bias").dtype if bias else torch.float32
    linear = QuantLinear(
        k, n, linear_format, bias=bias, permuted=permuted, dtype=dtype, device=device
    )
    for part, buffer in linear.named_buffers():
        stored = checkpoint.read(f"{name}.{part}")
        if stored.shape != buffer.shape or stored.dtype != buffer.dtype:
            raise QtoolError(
                f"{name}.{part}: {stored.dtype} {list(stored.shape)} found, "
                f"{buffer.dtype} {list(buffer.shape)} declared by the format"
            )
        buffer.copy_(stored)
    return linear
