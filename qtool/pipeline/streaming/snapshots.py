"""Stores the activations that enter a block, so that a killed run continues there.

While a block is computed, its inputs are only read. Meanwhile the thread that writes shards copies
the inputs to the run's directory, after the shards of all earlier blocks, so complete activations
imply complete shards. Only the newest activations are kept. If a copy is not complete when the
block's outputs overwrite the inputs, it is given up, unless the wait for it is a small share of the
run. :mod:`qtool.calibration.reference` tells when the float model's inputs change.

Each rank keeps the activations of its own batches; they are used only if all ranks have them.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from threading import Event

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.distributed import ranks
from qtool.errors import NoSpace
from qtool.io.output import Output
from qtool.io.safetensors import Entry
from qtool.io.write_behind import WriteBehind
from qtool.units import bytes_text

NAME = "activations"
#: share of a run's time that may be spent waiting for activations to be written, plus seconds
SHARE, ALLOWANCE = 0.02, 1.0
#: assumed bytes a second of a write before its own speed is known
EXPECTED_SPEED = 1e9


class _GivenUp(Exception):
    """The activations are about to change."""


class Snapshot:
    """One block's input activations while they are written."""

    def __init__(self, block: int, paths: dict[str, Sequence[Batch]]) -> None:
        self.block = block
        self.inputs = {
            f"{path}.{i}.{name}": tensor
            for path, batches in paths.items()
            for i, batch in enumerate(batches)
            for name, tensor in batch.tensors.items()
        }
        self.nbytes = sum(tensor.nbytes for tensor in self.inputs.values())
        self.started, self.done, self.given_up = 0.0, 0, Event()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The block's inputs in all batches, sequence by sequence, until they are given up.

        A sequence from a GPU is in pinned memory, which the next sequence overwrites.
        """
        self.started = time.monotonic()
        on_gpu = [tensor[:1].nbytes for tensor in self.inputs.values() if tensor.is_cuda]
        room = torch.empty(max(on_gpu, default=0), dtype=torch.uint8, pin_memory=bool(on_gpu))
        for name, tensor in self.inputs.items():
            for part in tensor.split(1):
                if self.given_up.is_set():
                    raise _GivenUp
                if part.is_cuda:
                    part = room[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
                yield name, part
                self.done += part.nbytes

    def seconds_left(self) -> float:
        """Seconds that the write still takes at its speed so far."""
        if not self.done:
            return self.nbytes / EXPECTED_SPEED
        return (time.monotonic() - self.started) * (self.nbytes / self.done - 1)


class Snapshots:
    """Writes the activations that enter each block and finds those of an earlier run.

    Args:
        writer: the thread that also writes shards.
        missing_bytes: function that returns the bytes that missing shards will take on the disk.
        timed: function that returns a context which measures the writing.
    """

    def __init__(
        self,
        output: Output,
        device: torch.device,
        writer: WriteBehind,
        missing_bytes: Callable[[], int],
        timed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.output, self.device, self.writer = output, device, writer
        self.missing_bytes, self.timed = missing_bytes, timed
        self._pending: tuple[Snapshot, Future[bool]] | None = None
        self._began, self._waited, self._full = time.monotonic(), 0.0, False

    def newest(self, block: int) -> tuple[int, dict[str, Entry]] | None:
        """The last block up to ``block`` whose inputs all ranks have, and this rank's inputs."""
        own = {}
        for name in self.output.kept_names(f"{NAME}-"):
            number, *owner = _numbers(name)
            mine = number <= block and owner == [ranks.rank(), ranks.size()]
            if mine and (found := self.output.kept(name)):
                own[number] = found[0]
        everywhere = set.intersection(*map(set, ranks.all_gather(list(own))))
        if everywhere:
            return max(everywhere), own[max(everywhere)]
        sizes = {_numbers(name)[2] for name in self.output.kept_names(f"{NAME}-")}
        if others := sizes - {ranks.size()}:
            ranks.log(
                f"the activations on disk are of world size {min(others)}, this run has "
                f"{ranks.size()}: the finished blocks are run again"
            )
        return None

    def take(self, block: int, **paths: Sequence[Batch]) -> None:
        """Begin to write the inputs of ``block``: batches by the name of their path.

        The batches must not change before :meth:`settle`.
        """
        snapshot = Snapshot(block, paths)
        free = shutil.disk_usage(self.output.partial).free
        if not all(ranks.all_gather(snapshot.nbytes + self.missing_bytes() < free)):
            if not self._full:
                ranks.log(
                    f"no room on the disk for the activations ({bytes_text(snapshot.nbytes)}): "
                    "--resume would run the finished blocks again"
                )
            self._full = True
            return
        cuda = self.device.type == "cuda"
        ready = torch.cuda.current_stream(self.device).record_event() if cuda else None

        def write() -> bool:
            if ready:
                ready.synchronize()
            name = self._name(block)
            try:
                with self.timed(), torch.cuda.stream(ready and torch.cuda.Stream(self.device)):
                    self.output.keep(name, snapshot.inputs, snapshot.tensors(), {}, sync=False)
            except (_GivenUp, NoSpace, OSError):
                return False
            return True

        self._pending = snapshot, self.writer.submit_optional(write)

    def settle(self) -> None:
        """Finish or give up the current write on all ranks, so that activations may change.

        If all ranks have the new activations, the earlier ones are removed.
        """
        if self._pending is None:
            return
        (snapshot, future), self._pending = self._pending, None
        now = time.monotonic()
        if not future.done():
            allowed = SHARE * (now - self._began) + ALLOWANCE
            if self._waited + snapshot.seconds_left() > allowed:
                snapshot.given_up.set()
        whole = future.result()
        self._waited += time.monotonic() - now
        if not all(ranks.all_gather(whole)):
            self.output.drop(self._name(snapshot.block))
            return
        for name in self.output.kept_names(f"{NAME}-"):
            number, rank, size = _numbers(name)
            if size != ranks.size() or (rank == ranks.rank() and number != snapshot.block):
                self.output.drop(name)

    def _name(self, block: int) -> str:
        return f"{NAME}-{block:05d}-{ranks.rank()}-of-{ranks.size()}"


def _numbers(name: str) -> tuple[int, int, int]:
    """Block, rank and number of ranks in a file's name."""
    block, rank, size = map(int, re.findall(r"\d+", name))
    return block, rank, size
