"""The block loop: makes the missing shards and hands them to the writer.

A shard is finished when its record is on disk.

Embedding and head, on which no block depends, are written first, while the first blocks are made. A
resumed run starts at the newest block whose inputs are on disk. A later block that is already
written is only run, with the weights of its shard, to compute the inputs of the next one.

Each of R ranks writes every R-th shard. It makes plain blocks alone; all ranks make the other
blocks together.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.method import LEARNING_SEQUENCES, Transform
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.calibration.timing import BESIDE, PhaseTimer, phase
from qtool.distributed import ranks
from qtool.errors import Interrupted, in_one_line
from qtool.io.output import RUN, Output
from qtool.io.run_record import RunRecord
from qtool.io.safetensors import read, read_header
from qtool.io.source import Checkpoint
from qtool.io.write_behind import WriteBehind
from qtool.pipeline.job import Job
from qtool.pipeline.planning.memory import (
    batch_sequences,
    compute_dtype,
    gradient_bytes,
    source_job,
)
from qtool.pipeline.streaming import embedding_and_head
from qtool.pipeline.streaming.activations import (
    Activations,
    described,
    given,
    place_for,
)
from qtool.pipeline.streaming.built_blocks import BuiltBlocks
from qtool.pipeline.streaming.method_checks import running_method
from qtool.pipeline.streaming.snapshots import Snapshots
from qtool.pipeline.streaming.stream_gradients import NoBackward, stream_gradients
from qtool.pipeline.streaming.streamed_blocks import StreamedBlocks
from qtool.plugins import require_returned
from qtool.progress import Progress


class Shards:
    """The shards of ``job``: the embedding, one a block, final norm and head.

    Args:
        specs: :meth:`Job.shards` of the job.
        phases: timer that records the time of each phase.
        progress: called after each shard with (done, total, notes).
    """

    def __init__(
        self,
        source: Checkpoint,
        job: Job,
        specs: Sequence[Mapping[str, Tensor]],
        output: Output,
        device: torch.device,
        record: RunRecord,
        phases: PhaseTimer,
        progress: Progress | None,
    ) -> None:
        self.source, self.job, self.specs, self.output = source, job, specs, output
        self.device, self.record, self.phases, self.progress = device, record, phases, progress
        self.done = len(output.records)
        self.collective = not job.is_plain

    def make(self, tokens: Sequence[Tensor], activations: str) -> None:
        """Make and write the missing shards.

        Args:
            tokens: calibration batches ``[B, S]``.
            activations: the place in which activations are kept, or ``auto``.

        Raises:
            Interrupted: the device has too little memory for a block, or the disk for a shard.
        """
        try:
            self._make(tokens, activations)
        except torch.OutOfMemoryError as error:
            others = " or pass --activations host" if self.job.needs_data else ""
            raise Interrupted(
                f"{self.device} ran out of memory ({in_one_line(error)}) after "
                f"{len(self.output.records)} of {len(self.specs)} shards; these are kept: free "
                f"memory{others}, then --resume"
            ) from error

    def _make(self, tokens: Sequence[Tensor], activations: str) -> None:
        output, last = self.output, len(self.specs)
        missing = [
            s
            for s in range(2, last)
            if s not in output.records and (self.collective or output.is_written_here(s))
        ]
        with WriteBehind() as writer:
            start, blocks = self._blocks(self._batches(tokens), activations, missing, writer)
            with closing(blocks):
                outside = ((1, embedding_and_head.tables), (last, embedding_and_head.head))
                for shard, tensors in outside:
                    if shard not in output.records and output.is_written_here(shard):
                        self._write(writer, shard, tensors(self.source, self.job, self.device), {})
                for shard in range(2 + start, max(missing, default=1) + 1):
                    self._block(blocks, shard, missing, writer)
                with phase("write"):
                    writer.wait()

    def _block(
        self,
        blocks: StreamedBlocks | BuiltBlocks,
        shard: int,
        missing: Sequence[int],
        writer: WriteBehind,
    ) -> None:
        """Make the block of ``shard`` if it is missing; run it if a later shard is missing."""
        following = next((other for other in missing if other > shard), None)
        tensors: Iterable[tuple[str, Tensor]] | None = None
        if shard in missing:
            notes: dict[str, Any] = {}
            ahead = None if following is None else following - 2
            tensors = blocks.tensors(shard - 2, ahead, self.specs[shard - 1], notes)
            with phase("write"):
                if self.output.is_written_here(shard):
                    self._write(writer, shard, tensors, notes)
        if following is not None and isinstance(blocks, BuiltBlocks):
            blocks.propagate(shard - 2, dict(tensors or _stored(self.output.path(shard))))

    def _write(
        self,
        writer: WriteBehind,
        shard: int,
        tensors: Iterable[tuple[str, Tensor]],
        notes: dict[str, Any],
    ) -> None:
        """Write ``shard`` in the writer's thread.

        If weights are rounded one by one, that thread also rounds them and runs alone.
        """

        def write() -> None:
            with self.phases.thread("write"):
                self.output.write_shard(shard, self.specs[shard - 1], tensors, notes)

        writer.submit(self._beside(write), partial(self._written, shard))

    def _batches(self, tokens: Sequence[Tensor]) -> Sequence[Tensor]:
        """The calibration batches; on a GPU larger ones, each of whole iterations of an optimizer.

        The batches are the same for every number of ranks.
        """
        if len({ids.shape[1] for ids in tokens}) != 1:
            return tokens
        size, window = tokens[0].shape
        sequences = batch_sequences(self.job, window, self.device, size)
        return tokens if sequences == size else torch.cat(list(tokens)).split(sequences)

    def _blocks(
        self,
        tokens: Sequence[Tensor],
        activations: str,
        missing: Sequence[int],
        writer: WriteBehind,
    ) -> tuple[int, StreamedBlocks | BuiltBlocks]:
        """The first block to compute, and the object that makes it and the later ones."""
        if not self.collective:
            return 0, StreamedBlocks(self.source, self.job, self.device)
        place = self._place(tokens, activations)
        timed = partial(self.phases.thread, "activations")
        missing_bytes = partial(self.output.missing_bytes, self.specs)
        snapshots = Snapshots(self.output, self.device, writer, missing_bytes, timed)
        self._learn(tokens, snapshots)
        if self.job.weighs_outputs:
            self._differentiate(tokens, snapshots, writer)
        start, kept = (missing and snapshots.newest(missing[0] - 2)) or (0, None)
        blocks = BuiltBlocks(
            self.source,
            self.job,
            tokens,
            self.device,
            place,
            snapshots,
            self.phases,
            start,
            kept,
            self._sensitivity,
        )
        return start, blocks

    def _place(self, tokens: Sequence[Tensor], activations: str) -> Activations:
        """The place of the activations; ``auto`` is the first with room."""
        room = math.inf
        if self.job.needs_data:
            own = sum(ids.numel() for ids in ranks.local_items(tokens))
            sizes = own, max(ids.shape[1] for ids in tokens)
            if activations == "auto":
                activations, room = place_for(self.job, *sizes, self.device)
            else:
                activations = given(activations, self.device)
            ranks.log(described(self.job, *sizes, self.device, activations))
        return self._activations(activations, room)

    def _activations(self, place: str, room: float = math.inf) -> Activations:
        dtype = compute_dtype(self.job, self.device)
        return Activations(place, dtype, self.output.partial / RUN, room)

    def _learn(self, tokens: Sequence[Tensor], snapshots: Snapshots) -> None:
        """Let the transforms that learn from all blocks do so, on the first of several ranks.

        The learned tensors are kept on disk, so that a resumed run has the same.
        """
        output = self.output
        for number, transform in enumerate(self.job.transforms):
            if not transform.learns:
                continue
            name, found = f"learned-{transform.name}", {}
            if ranks.rank() == 0:
                if kept := output.kept(name):
                    found = {key: read(entry) for key, entry in kept[0].items()}
                else:
                    with ranks.alone(), phase("search"):
                        found = self._learned(transform, number, tokens, snapshots)
                    output.keep(name, found, found.items(), {})
            shared = ranks.broadcast(found)
            transform.load({name: tensor.to(self.device) for name, tensor in shared.items()})

    def _differentiate(
        self, tokens: Sequence[Tensor], snapshots: Snapshots, writer: WriteBehind
    ) -> None:
        """Find how the logits depend on the residual stream after each block, on the first rank.

        The factors are kept on disk until their blocks are written, so that a resumed run has the
        same. There are none if a backward pass through the blocks fails.
        """
        output = self.output
        missing = (index for index in range(self.job.blocks) if index + 2 not in output.records)
        names = {index: _gradients(index) for index in missing}
        if ranks.rank() == 0 and not all(map(output.kept, names.values())):
            with ranks.alone(), phase("search"):
                try:
                    self._keep_gradients(names, tokens, snapshots, writer)
                except NoBackward as error:
                    writer.wait()
                    ranks.log(
                        "output_hessian is left out: a backward pass through the blocks of"
                        f" {self.job.family.name} fails ({error})"
                    )
                    for name in names.values():
                        output.drop(name)
        ranks.barrier()

    def _keep_gradients(
        self,
        names: Mapping[int, str],
        tokens: Sequence[Tensor],
        snapshots: Snapshots,
        writer: WriteBehind,
    ) -> None:
        """Write the factors of the blocks in ``names`` to the files of these names.

        Raises:
            NoBackward: a backward pass through the blocks fails.
        """
        job = source_job(self.job)
        text = torch.cat([ids.flatten() for ids in tokens])
        with self._few(job, tokens, snapshots) as built:
            inputs = sum(size * length for size, length in built.batches.shapes)
            window = max(length for _, length in built.batches.shapes)
            beside = gradient_bytes(job, inputs)
            kept = place_for(job, job.blocks * inputs, window, self.device, beside)
            place = self._activations(*kept)
            for index, factor in stream_gradients(built, place, text):
                if index in names:
                    stored = {"factor": factor.half().contiguous()}
                    keep = partial(self.output.keep, names[index], stored, stored.items(), {})
                    writer.submit(self._beside(partial(keep, sync=False)), lambda: None)
            writer.wait()

    def _sensitivity(self, index: int) -> Tensor | None:
        """What :meth:`_differentiate` has found for block ``index``, if anything."""
        if not self.job.weighs_outputs:
            return None
        found = None
        if ranks.rank() == 0 and (kept := self.output.kept_entries(_gradients(index))):
            found = read(kept["factor"])
        return ranks.broadcast(found)

    def _learned(
        self, transform: Transform, number: int, tokens: Sequence[Tensor], snapshots: Snapshots
    ) -> dict[str, Tensor]:
        """What transform ``number`` learns from blocks that the earlier ones have rewritten."""
        job = self.job
        earlier = replace(job, transforms=job.transforms[:number], rounding=RoundToNearest())
        few = self._few(earlier, tokens, snapshots, job.transforms)
        with few as built, running_method(transform, "learn"):
            found = transform.learn(built.blocks(), built.batches)
        for key, tensor in require_returned(transform, "learn", found, dict[str, Any]).items():
            require_returned(transform, "learn", tensor, Tensor, f" for {key!r}")
        return found

    def _few(
        self,
        job: Job,
        tokens: Sequence[Tensor],
        snapshots: Snapshots,
        announcing: Sequence[Transform] = (),
    ) -> AbstractContextManager[BuiltBlocks]:
        """The blocks of ``job`` with :data:`LEARNING_SEQUENCES` sequences, on the device.

        ``announcing`` transforms may come later than those of ``job``.
        """
        few, place = list(_first(tokens, LEARNING_SEQUENCES)), self._activations("device")
        own = (self.source, job, few, self.device, place, snapshots, self.phases)
        return closing(BuiltBlocks(*own, announcing=announcing))

    def _beside(self, write: Callable[[], None]) -> Callable[[], None]:
        """``write`` for another thread: its copies from a GPU wait for what is queued now.

        The GPU does not wait for the copies.
        """
        if self.device.type != "cuda":
            return write
        ready = torch.cuda.current_stream(self.device).record_event()
        stream = torch.cuda.Stream if self.collective else torch.cuda.default_stream

        def run() -> None:
            with torch.cuda.stream(stream(self.device)):
                torch.cuda.current_stream(self.device).wait_event(ready)
                write()

        return run

    def _written(self, shard: int) -> None:
        self.output.drop(_gradients(shard - 2))
        self.done = min(self.done + ranks.size(), len(self.specs))  # other ranks are as far
        self.phases.settle()
        behind = {f"{name}{BESIDE}": seconds for name, seconds in dict(self.phases.beside).items()}
        self.record.attempt.phases = {**self.phases.seconds, **behind}
        self.record.shard_written()
        if self.progress:
            self.progress(self.done, len(self.specs), self.output.records[shard]["notes"])


def _gradients(block: int) -> str:
    return f"gradients-{block:05d}"


def _stored(path: Path) -> Iterable[tuple[str, Tensor]]:
    return ((name, read(entry)) for name, entry in read_header(path).items())


def _first(tokens: Sequence[Tensor], sequences: int) -> Iterator[Tensor]:
    """Batches of the first ``sequences`` sequences; the last batch is cut."""
    for ids in tokens:
        if sequences > 0:
            yield ids[:sequences]
            sequences -= len(ids)
