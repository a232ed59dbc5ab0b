"""Splits any value into bytes and one buffer of its tensors, to send between devices.

All but the tensors is pickled between the ranks of one run, as in torch's own collectives; no file
is ever unpickled.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

#: shape, dtype and kind of device of each tensor, in order
TensorSpecs = list[tuple[tuple[int, ...], torch.dtype, str]]

#: bytes; tensors in a buffer begin at multiples of this number, and buffers end at one
ALIGNMENT = 16


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # by id, so that a repeated tensor is sent once

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, Tensor):
            return None
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.tensors)
            self.tensors.append(value)  # kept alive, so that its id stays unique
        return self.numbers[id(value)]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[Tensor]) -> None:
        super().__init__(file)
        self.tensors = tensors

    def persistent_load(self, number: int) -> Tensor:
        return self.tensors[number]


def split_tensors(value: Any) -> tuple[bytes, list[Tensor]]:
    """``value`` pickled without its tensors, and the tensors."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    return file.getvalue(), pickler.tensors


def specs_of(tensors: Sequence[Tensor]) -> TensorSpecs:
    """Shapes, dtypes and devices of ``tensors``, for another process to allocate a buffer."""
    return [(tuple(t.shape), t.dtype, t.device.type) for t in tensors]


def size(specs: TensorSpecs) -> int:
    """The bytes of a buffer for the tensors, aligned so that another buffer may follow."""
    places = _places(specs)
    return _aligned(places[-1].stop) if places else 0


def pack(tensors: Sequence[Tensor], device: str) -> Tensor:
    """A uint8 buffer on ``device`` with copies of ``tensors``."""
    specs = specs_of(tensors)
    packed = torch.empty(size(specs), dtype=torch.uint8, device=device)
    for tensor, place in zip(tensors, _places(specs), strict=True):
        packed[place] = tensor.detach().contiguous().flatten().view(torch.uint8).to(device)
    return packed


def join_tensors(blob: bytes, specs: TensorSpecs, packed: Tensor) -> Any:
    """The value of :func:`split_tensors`, from its bytes and the buffer.

    Tensors that were on a CPU are on this process's CPU, others on the buffer's device.
    """
    tensors = [
        packed[place].view(dtype).view(shape).to("cpu" if kind == "cpu" else packed.device)
        for (shape, dtype, kind), place in zip(specs, _places(specs), strict=True)
    ]
    return _Unpickler(io.BytesIO(blob), tensors).load()


def _places(specs: TensorSpecs) -> list[slice]:
    """The bytes of each tensor in the buffer."""
    places, start = [], 0
    for shape, dtype, _ in specs:
        stop = start + torch.Size(shape).numel() * dtype.itemsize
        places.append(slice(start, stop))
        start = _aligned(stop)
    return places


def _aligned(place: int) -> int:
    """The first multiple of :data:`ALIGNMENT` from ``place`` on."""
    return -(-place // ALIGNMENT) * ALIGNMENT
