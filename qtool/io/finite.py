"""Refuses NaN and Inf in tensors that are read from a source."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.io.source import Checkpoint

#: bytes of a matrix that are in memory at a time
PIECE_BYTES = 64 << 20
CPU = torch.device("cpu")


def finite_rows(source: Checkpoint, name: str, device: torch.device = CPU) -> Iterator[Tensor]:
    """The rows of matrix ``name`` on ``device``, in pieces that have 64 MiB in float32."""
    rows, columns = source.entry(name).shape
    step, pinned = max(1, PIECE_BYTES // (4 * columns)), device.type == "cuda"
    for start in range(0, rows, step):  # no piece has a name here, which would hold it meanwhile
        piece_rows = slice(start, start + step)
        yield require_finite(name, source.read(name, piece_rows, pinned=pinned).to(device))


def require_all_finite(tensors: Mapping[str, Tensor]) -> None:
    """:func:`require_finite` for all tensors by name, with a single wait for a GPU."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors.values():
        found = extremes(tensor)
        by_dtype.setdefault(found[0].dtype, []).extend(found)
    whole = [torch.isfinite(torch.stack(found)).all() for found in by_dtype.values()]
    if whole and not torch.stack(whole).all():
        for name, tensor in tensors.items():
            require_finite(name, tensor)


def require_finite(name: str, tensor: Tensor) -> Tensor:
    """``tensor``, if it holds no NaN or Inf.

    Raises:
        QtoolError: names the tensor and the number of such values.
    """
    if not is_finite(tensor):
        bad = int((~torch.isfinite(tensor.float())).sum())
        raise QtoolError(f"{name}: holds {bad} NaN or Inf values; the checkpoint is damaged")
    return tensor


def is_finite(tensor: Tensor) -> Tensor:
    """Whether no element is NaN or Inf, as a tensor ``[]``."""
    return torch.isfinite(torch.stack(extremes(tensor))).all()


def extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest element; both are NaN if any element is NaN."""
    if tensor.is_floating_point() and tensor.itemsize == 1:  # torch has no extremes of fp8
        tensor = tensor.float()
    least, largest = torch.aminmax(tensor if tensor.numel() else tensor.new_zeros(1))
    return least, largest
