"""Keeps calibration activations between two blocks: on the device, on the host, or in a file.

They are all that grows with the number of calibration tokens: tokens x hidden size, in the dtype of
forwards. A file is mapped into memory, laid out on disk in full before the first byte is used, and
dropped from memory after each use.
"""

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import activation_bytes, working_bytes
from qtool.pipeline.units import bytes_text

#: and how a sentence about it ends
PLACES = {"device": "on the device", "host": "in host memory", "disk": "in files on disk"}
#: of the free memory that a run may plan with, on the device and on the host, which others use too
DEVICE_SHARE, HOST_SHARE = 0.9, 0.5


def place_for(job: Job, tokens: int, device: torch.device) -> str:
    """The place for the activations of ``tokens`` tokens on this machine."""
    host_free = available_host_bytes()
    device_free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host_free
    return choose(job, tokens, device, device_free, host_free)


def available_host_bytes() -> int:
    """Memory that processes may still have, as the kernel estimates it."""
    try:
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def described(job: Job, tokens: int, device: torch.device, place: str) -> str:
    """One line for plans and logs."""
    size = bytes_text(activation_bytes(job, tokens, device))
    return f"calibration activations: {size}, kept {PLACES[place]}"


def choose(
    job: Job, tokens: int, device: torch.device, device_free: float, host_free: float
) -> str:
    """The first place with room for the activations of ``tokens`` beside a block's memory."""
    nbytes = activation_bytes(job, tokens, device)
    if nbytes + working_bytes(job, tokens, device) <= DEVICE_SHARE * device_free:
        return "device"
    return "host" if device.type == "cuda" and nbytes <= HOST_SHARE * host_free else "disk"


def compute_dtype(job: Job, device: torch.device) -> torch.dtype | None:
    """The dtype of forwards: the model's own 16-bit one on CUDA; None is float32."""
    return job.dtype if device.type == "cuda" and job.dtype.itemsize == 2 else None


class Activations:
    """Makes batches that live in one place.

    Args:
        place: a key of :data:`PLACES`. dtype: they are kept in; None: as they come.
        directory: for the file of each batch, if ``place`` is ``disk``.
    """

    def __init__(self, place: str, dtype: torch.dtype | None, directory: Path) -> None:
        self.place, self.dtype, self.directory, self.count = place, dtype, directory, 0

    def batch(self, hidden: Tensor, kwargs: Sequence[dict[str, Any]]) -> Batch:
        """A batch of ``hidden [B, S, H]``, moved to its place.

        Raises:
            QtoolError: no space left on the disk.
        """
        hidden = hidden.to(self.dtype or hidden.dtype)
        if self.place == "device":
            return Batch(hidden, kwargs)
        if self.place == "host":
            return HostBatch(
                torch.empty_like(hidden, device="cpu", pin_memory=True).copy_(hidden), kwargs
            )
        self.count += 1
        path = self.directory / f"activations-{ranks.rank()}-{self.count:05d}"
        return DiskBatch.make(path, hidden, kwargs)


class HostBatch(Batch):
    """Hidden states in pinned memory, which outputs are copied to without waiting."""

    def keep(self, hidden: Tensor) -> None:
        self.hidden.copy_(hidden, non_blocking=True)


class DiskBatch(Batch):
    """Hidden states in a mapped file."""

    mapped: mmap.mmap

    @classmethod
    def make(cls, path: Path, hidden: Tensor, kwargs: Sequence[dict[str, Any]]) -> "DiskBatch":
        """Lay out the file ``path`` and fill it."""
        try:
            with path.open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, hidden.nbytes)
                mapped = mmap.mmap(file.fileno(), hidden.nbytes)
            path.unlink()  # its space is free again when the run ends, however it ends
        except OSError as error:
            raise QtoolError(
                f"no space left on the disk that holds {path.parent} for the activations"
            ) from error
        batch = cls(torch.frombuffer(mapped, dtype=hidden.dtype).view(hidden.shape), kwargs)
        batch.mapped = mapped
        batch.keep(hidden)
        return batch

    def keep(self, hidden: Tensor) -> None:
        self.hidden.copy_(hidden)
        self.mapped.madvise(mmap.MADV_DONTNEED)
