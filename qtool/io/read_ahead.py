"""Reads the next block's weights while the current block is computed.

Several tensors are read at once, because one thread copies from the page cache at a fraction of the
memory's speed. The weights are copied to a GPU while the current block's last forwards run.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor

from qtool.io.safetensors import read
from qtool.io.source import Checkpoint
from qtool.models.architecture import Architecture

#: tensors that are read at once
READERS = 4


class ReadAhead:
    """Reads blocks of ``source`` in threads, one block ahead.

    Args:
        pinned: read into pinned memory, from which a GPU copies at full speed.
        timed: function that returns a context which measures the reading.
    """

    def __init__(
        self,
        source: Checkpoint,
        model: Architecture,
        *,
        pinned: bool,
        timed: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.source, self.model, self.pinned, self.timed = source, model, pinned, timed
        self._thread = ThreadPoolExecutor(1, "read")
        self._readers = ThreadPoolExecutor(READERS, "read tensors")
        self._ahead: tuple[int, Future[dict[str, Tensor]]] | None = None
        self._moved: tuple[int, dict[str, Tensor], torch.cuda.Event] | None = None

    def block(self, index: int, following: int | None) -> dict[str, Tensor]:
        """The tensors of block ``index`` by their name within it.

        Args:
            following: the block to read next; reading starts now.
        """
        moved, self._moved = self._moved, None
        if moved is not None:
            moved[2].wait()  # also if it is dropped: its memory is used again
        if self._ahead is None or self._ahead[0] != index:
            self._start(index)
        assert self._ahead is not None
        weights = self._ahead[1].result()
        self._ahead = None
        if following is not None:
            self._start(following)
        if moved is None or moved[0] != index:
            return weights
        return moved[1]

    def move(self, device: torch.device) -> None:
        """Copy the block that was read ahead, if there is one, to the GPU, once.

        The copy runs in parallel with work that is queued from now on.
        """
        if self._moved is not None or self._ahead is None or not self._ahead[1].done():
            return
        index, weights = self._ahead[0], self._ahead[1].result()
        moved = {name: torch.empty_like(weight, device=device) for name, weight in weights.items()}
        beside = torch.cuda.Stream(device)
        beside.wait_stream(torch.cuda.current_stream(device))  # it may have used this memory
        with torch.cuda.stream(beside):
            for name, weight in weights.items():
                moved[name].copy_(weight, non_blocking=True)
            self._moved = index, moved, beside.record_event()

    def close(self) -> None:
        """Stop reading."""
        self._thread.shutdown(cancel_futures=True)
        self._readers.shutdown()

    def _start(self, index: int) -> None:
        self._ahead = index, self._thread.submit(self._read, index)

    def _read(self, index: int) -> dict[str, Tensor]:
        prefix, names = self.model.full(index, ""), self.model.block_shapes(index)
        entries = (self.source.entry(prefix + name) for name in names)
        with self.timed():
            tensors = self._readers.map(partial(read, pinned=self.pinned), entries)
            return dict(zip(names, tensors, strict=True))
