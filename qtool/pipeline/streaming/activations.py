"""Keeps calibration activations between two blocks: on the device, on the host, or in a file.

Of all that a run holds, only activations grow with the number of calibration tokens: tokens x
hidden size in the dtype of forwards, and further tensors that the model's blocks pass on. A file is
mapped into memory, allocated on disk in full before the first byte is used, and dropped from memory
after each use.
"""

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from qtool.calibration.batch import HIDDEN, Batch, BlockArguments
from qtool.distributed import ranks
from qtool.io.safetensors import space_for
from qtool.pipeline.free_memory import gpu_memory, host_memory
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import (
    DEVICE_SHARE,
    HOST_SHARE,
    activation_bytes,
    working_bytes,
)
from qtool.units import bytes_text

#: places, each with the end of a sentence about it
PLACES = {
    "device": "on the device",
    "both": "on the device and, where it has no room, in host memory",
    "host": "in host memory",
    "disk": "in files on disk",
}


def place_for(
    job: Job, tokens: int, window: int, device: torch.device, beside: int = 0
) -> tuple[str, float]:
    """The place for the activations of ``tokens``, in windows of ``window``, on this machine.

    ``beside`` bytes of the device are for other things than a block and the activations. Ranks on
    one machine share its memory evenly. The result also has the bytes of the device that are free
    for activations.
    """
    host_free = host_memory()[1] / ranks.local_size()
    device_free = gpu_memory(device)[1] if device.type == "cuda" else host_free
    room = device_room(job, tokens, window, device, device_free, beside)
    return choose(job, tokens, window, device, room, host_free), room


def device_room(
    job: Job, tokens: int, window: int, device: torch.device, device_free: float, beside: int = 0
) -> float:
    """Bytes of ``device`` that a block and ``beside`` bytes leave for activations."""
    used = working_bytes(job, tokens, window, device) + beside
    return max(0.0, DEVICE_SHARE * device_free - used)


def described(job: Job, tokens: int, window: int, device: torch.device, place: str) -> str:
    """A sentence on the size of the activations and their place."""
    size = bytes_text(activation_bytes(job, tokens, window, device))
    return f"calibration activations: {size}, kept {PLACES[reported(place, device)]}"


def reported(place: str, device: torch.device) -> str:
    """``place`` as users know it: a CPU's memory is the host's."""
    return "host" if device.type == "cpu" and place == "device" else place


def given(place: str, device: torch.device) -> str:
    """The ``place`` that a user named: a CPU's memory is the host's."""
    return "device" if device.type == "cpu" and place == "host" else place


def choose(
    job: Job, tokens: int, window: int, device: torch.device, room: float, host_free: float
) -> str:
    """The first place with room for the activations of ``tokens``, of which the device has some."""
    nbytes = activation_bytes(job, tokens, window, device)
    if nbytes <= room:
        return "device"
    if device.type != "cuda" or nbytes - room > HOST_SHARE * host_free:
        return "disk"
    return "both" if room else "host"


class Activations:
    """Makes batches that are kept in one place.

    Args:
        place: a key of :data:`PLACES`.
        dtype: dtype in which hidden states are kept.
        directory: directory for the files of each batch, if ``place`` is ``disk``.
        room: bytes of the device for activations; those on it are subtracted.
    """

    def __init__(self, place: str, dtype: torch.dtype, directory: Path, room: float) -> None:
        self.place, self.dtype, self.directory, self.room = place, dtype, directory, room
        self.count = 0

    def batch(self, tensors: Mapping[str, Tensor], kwargs: BlockArguments, axis: int = 0) -> Batch:
        """A batch of hidden states ``[B, S, H]`` and other passed tensors, moved to its place.

        Raises:
            NoSpace: the disk is full.
        """
        hidden = tensors[HIDDEN].to(self.dtype)
        tensors, nothing = {**tensors, HIDDEN: hidden}, hidden.new_empty(0)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        if self.place == "device" or (self.place == "both" and nbytes <= self.room):
            self.room -= nbytes
            batch = Batch(nothing, kwargs)
        elif self.place in ("both", "host"):
            batch = HostBatch(nothing, kwargs)
        else:
            self.count += 1
            path = self.directory / f"activations-{ranks.rank()}-{self.count:05d}"
            batch = DiskBatch(nothing, kwargs, path=path)
        batch.axis = axis
        batch.keep(tensors)
        return batch


class HostBatch(Batch):
    """Activations in pinned memory, to which outputs are copied without waiting."""

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        pinned = self.reusable(name, tensor)
        if pinned is None:
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return pinned.copy_(tensor, non_blocking=True)


@dataclass
class DiskBatch(Batch):
    """Activations in mapped files, one for each tensor, all made at ``path`` in turn."""

    path: Path = Path()
    mapped: dict[str, mmap.mmap] = field(default_factory=dict)

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        found = self.reusable(name, tensor)
        if found is None:
            self.mapped[name] = self._mapped_file(tensor.nbytes)
            found = torch.frombuffer(self.mapped[name], dtype=tensor.dtype).view(tensor.shape)
        found.copy_(tensor)
        self.mapped[name].madvise(mmap.MADV_DONTNEED)
        return found

    def _mapped_file(self, nbytes: int) -> mmap.mmap:
        """A file of ``nbytes``, mapped."""
        with space_for(self.path), self.path.open("w+b") as file:
            self.path.unlink()  # frees the space when the run ends, even if it is killed
            os.posix_fallocate(file.fileno(), 0, nbytes)
            return mmap.mmap(file.fileno(), nbytes)
