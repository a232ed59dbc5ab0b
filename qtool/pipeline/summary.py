"""The summary of a run: size, time, and the error of each linear."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qtool.io.integrity import read_record
from qtool.io.model_directory import has_tokenizer
from qtool.io.run_record import peak_host_bytes, read_run
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.units import bytes_text, duration, times


@dataclass(frozen=True)
class Quantized:
    """A native checkpoint that a run wrote; it is a path-like object.

    Attributes:
        directory: directory of the checkpoint.
        source: the source model as the caller named it; empty for a model in memory.
        source_bytes: bytes of the tensors in the source's files.
        nbytes: bytes of the tensors in the checkpoint's files.
        seconds: seconds of the run, its resumptions included; None if they were not recorded.
        error_of: the quantity with the errors, ``weight`` or ``output``; empty if none was noted.
        errors: relative error of each linear with a noted error of that kind, by full name.
        imported: codes were repacked, nothing was quantized.
        adapter: directory of the adapter that was merged, if any; the source is then no baseline.
    """

    directory: Path
    source: str
    source_bytes: int
    nbytes: int
    seconds: float | None
    error_of: str
    errors: dict[str, float]
    imported: bool
    adapter: str | None = None

    def __fspath__(self) -> str:
        return str(self.directory)

    @property
    def ratio(self) -> float:
        """The factor by which the checkpoint is smaller than its source."""
        return self.source_bytes / self.nbytes

    def __str__(self) -> str:
        size = f"{self.directory}: {bytes_text(self.nbytes)}"
        if not self.imported:
            size += (
                f", {times(self.source_bytes, self.nbytes)} than {bytes_text(self.source_bytes)}"
            )
        if self.seconds is not None:
            size += f", in {duration(self.seconds)}"
        if self.errors:
            worst = max(self.errors, key=self.errors.__getitem__)
            size += (
                f"; largest relative error of {'an' if self.error_of[0] in 'aeiou' else 'a'}"
                f" {self.error_of} {self.errors[worst]:.4f} ({worst})"
            )
        where, source = shlex.quote(str(self.directory)), shlex.quote(self.source)
        text = "demo" if self.source == "demo" else "wikitext2"
        following = f"eval {text} --model {where}"
        if self.adapter is None and self.source:
            following += f" --compare {source}"
        if self.imported or not has_tokenizer(self.directory):
            following = f"verify {where}"
        return f"{size}\nnext: qtool {following}"

    def as_dict(self) -> dict[str, Any]:
        """The summary as plain data, for ``--json``."""
        return asdict(self) | {"directory": str(self.directory), "ratio": self.ratio}


def summarize(directory: Path, source: Checkpoint, name: str) -> Quantized:
    """The result in ``directory``, made from ``source``, which the caller called ``name``."""
    made = Checkpoint(directory)
    record = read_record(directory)
    what, noted = noted_errors(record.get("blocks", ()))
    blocks = family_of(made.config).blocks
    return Quantized(
        directory,
        name,
        source.nbytes,
        made.nbytes,
        read_run(directory, record.get("job", {})).get("seconds"),
        what,
        {f"{blocks}.{block}.{linear}": error for (block, linear), error in noted.items()},
        "imported from" in record,
        None if source.adapter is None else str(source.adapter.directory),
    )


def noted_errors(
    blocks: Sequence[Mapping[str, Any]],
) -> tuple[str, dict[tuple[int, str], float]]:
    """The quantity with the errors in the notes of ``blocks``, and the errors by block and linear.

    The quantity is ``output`` if such an error is noted, else ``weight``; empty if none is noted.
    """
    by_block = list(map(errors_of, blocks))
    for what in ("output", "weight"):
        errors = {
            (block, linear): error
            for block, found in enumerate(by_block)
            for linear, error in found[what].items()
        }
        if errors:
            return what, errors
    return "", {}


def errors_of(notes: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """The errors in the ``notes`` of a block, by quantity (``output``, ``weight``) and linear.

    GPTQ notes those of outputs, and any rounding those of weights; GPTQ rounds linears that saw few
    tokens to nearest, which have the error of a weight.
    """
    found: dict[str, dict[str, float]] = {"output": {}, "weight": {}}
    for method, noted in notes.items():
        for linear, note in noted.items() if isinstance(noted, Mapping) else ():
            if not isinstance(note, Mapping):
                continue
            if method == "gptq" and "error" in note:
                found["output"][linear] = note["error"]
            elif isinstance(note.get("weight_error"), int | float):
                found["weight"][linear] = note["weight_error"]
    return found


def shard_facts(notes: Mapping[str, Any]) -> str:
    """A progress line about a shard: peak memory of this process, and the block's largest error."""
    errors = noted_errors([notes])[1].values()
    worst = f", largest error {max(errors):.4f}" if errors else ""
    return f"peak {bytes_text(peak_host_bytes())}{worst}"
