"""Converts a checkpoint shard by shard, for exports and imports.

A :class:`Conversion` says which linear a tensor of the source belongs to and how it is converted.
:func:`convert` streams the source file by file, checks each file against its recorded hash, and
keeps a record, so that a killed conversion can be run again, continues and gives the same bytes.
"""

import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qtool.errors import DamagedFile, Interrupted, QtoolError
from qtool.exchange.export_format import as_dtype
from qtool.io.finite import require_finite
from qtool.io.integrity import hashes_to_check, read_record, require_file_intact
from qtool.io.output import Output
from qtool.io.run_record import RunRecord
from qtool.io.safetensors import write_json
from qtool.io.source import Checkpoint
from qtool.models.architecture import DTYPES
from qtool.progress import Progress

Tensors = Iterator[tuple[str, Tensor]]
Json = dict[str, Any]


@dataclass(frozen=True)
class Metadata:
    """The JSON of a converted checkpoint: config.json, qtool.json, and other files by name."""

    config: Json
    provenance: Json
    files: Mapping[str, Json]


class Conversion(ABC):
    """Says how each tensor of ``source`` is converted.

    Attributes:
        identity: facts by name; a killed conversion is continued only if all of them are equal.
            ``source model`` is the source's fingerprint by its recorded hashes, so that a damaged
            file can be replaced.
        dtype: the dtype of weights outside packed linears; None keeps the source's.
    """

    source: Checkpoint
    identity: Json
    dtype: torch.dtype | None = None

    @abstractmethod
    def owner(self, name: str) -> str | None:
        """The linear of tensor ``name``, or ``name`` itself; None leaves the tensor out."""

    def specs(self, owner: str) -> Tensors:
        """Names and ``meta`` tensors that ``owner`` is converted to; by default itself alone."""
        entry = self.source.entry(owner)
        dtype = self._dtype_of(entry.dtype)
        yield owner, torch.empty(entry.shape, dtype=dtype, device="meta")

    def tensors(self, owner: str, notes: Json) -> Tensors:
        """The tensors of :meth:`specs` with their content; it may add to the shard's ``notes``.

        Raises:
            QtoolError: the content cannot be converted.
        """
        tensor = require_finite(owner, self.source.read(owner))
        dtype = self._dtype_of(tensor.dtype)
        yield owner, tensor if dtype == tensor.dtype else as_dtype(tensor, dtype, owner)

    def _dtype_of(self, stored: torch.dtype) -> torch.dtype:
        """The new dtype of a tensor in dtype ``stored``; ids, masks and fp8 keep theirs."""
        return self.dtype if self.dtype and stored in DTYPES.values() else stored

    @abstractmethod
    def metadata(self) -> Metadata:
        """The JSON files to write after all shards."""


def convert(work: Conversion, out: Path, progress: Progress | None = None) -> list[Json]:
    """Convert ``work``'s source into the directory ``out``; returns each shard's notes.

    The file ``OUT.run.json`` beside ``out`` holds the time and memory of the conversion. A finished
    conversion is not done again.

    Raises:
        DamagedFile: a file of the source differs from its recorded hash. The finished shards are
            kept, and the next call continues if the file was replaced.
        QtoolError: the content cannot be converted, or the source changed meanwhile; nothing is
            left behind.
    """
    shards, recorded = shards_of(work), hashes_to_check(work.source.directory)
    output = Output(out, work.identity, len(shards), resume=True)
    if not output.finished:
        with closing(output):
            _convert(work, output, shards, recorded, progress)
    return read_record(out)["blocks"]


def _convert(
    work: Conversion,
    output: Output,
    shards: Mapping[Path, list[str]],
    recorded: Mapping[str, str],
    progress: Progress | None,
) -> None:
    """Make the shards that ``output`` lacks, and finish it."""
    begun = work.source.fingerprint()
    record = RunRecord(
        output.directory, output.identity, torch.device("cpu"), continued=output.continued
    )
    try:
        for number, (path, owners) in enumerate(shards.items(), 1):
            if number not in output.records:
                require_file_intact(path, recorded.get(path.name))
                _put(output, number, work, owners)
                record.shard_written()
            if progress:
                progress(number, len(shards), output.records[number]["notes"])
        work.source.require_unchanged(begun)
        _finish(output, work)
    except Interrupted:
        raise
    except DamagedFile:
        output.discard_empty()
        raise
    except QtoolError:
        shutil.rmtree(output.partial)  # refused for its content: nothing to continue
        record.path.unlink(missing_ok=True)
        raise


def shards_of(work: Conversion) -> dict[Path, list[str]]:
    """The owners of each file of the source; an owner belongs to the file of its first tensor."""
    shards: dict[Path, list[str]] = {}
    placed = set()
    for name, entry in work.source.entries.items():
        owner = work.owner(name)
        if owner is not None and owner not in placed:
            placed.add(owner)
            shards.setdefault(entry.path, []).append(owner)
    return dict(sorted(shards.items()))


def _put(output: Output, number: int, work: Conversion, owners: list[str]) -> None:
    """Write shard ``number``: the tensors converted from ``owners``."""
    notes: Json = {}
    specs = {name: spec for owner in owners for name, spec in work.specs(owner)}
    tensors = (pair for owner in owners for pair in work.tensors(owner, notes))
    output.write_shard(number, specs, tensors, notes)


def _finish(output: Output, work: Conversion) -> None:
    metadata = work.metadata()
    for file, content in metadata.files.items():
        write_json(output.partial / file, content)
    notes = [record["notes"] for _, record in sorted(output.records.items())]
    provenance = metadata.provenance | {"blocks": notes}
    output.finish(metadata.config, provenance, work.source.side_files())
