"""Write a native checkpoint in another loader's format, shard by shard; nothing is quantized anew."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from qtool.checkpoint.compressed_tensors import CompressedTensors
from qtool.checkpoint.source import Checkpoint
from qtool.checkpoint.target import Target
from qtool.errors import QtoolError, suggest
from qtool.pipeline.job import native_format
from qtool.pipeline.output import Output
from qtool.pipeline.verify import linear_shape, load_linear, packed_linears
from qtool.runtime.format import LinearFormat

TARGETS: dict[str, Target] = {target.name: target for target in (CompressedTensors(),)}


def export(directory: Path, name: str, out: Path) -> Path:
    """Export the native checkpoint in ``directory`` to ``out`` in format ``name``.

    Raises:
        QtoolError: an unknown format, or a linear the format cannot express (before any work).
    """
    if name not in TARGETS:
        raise QtoolError(f"unknown format {name!r}: {suggest(name, TARGETS)}")
    target, checkpoint = TARGETS[name], Checkpoint(directory)
    checkpoint_format = native_format(checkpoint.config)
    formats: dict[str, LinearFormat] = {}
    for linear in packed_linears(checkpoint):
        target.require(checkpoint_format, linear, linear_shape(checkpoint, linear))
        formats[linear] = checkpoint_format.of(linear)  # type: ignore[assignment]
    shards = _shards(checkpoint)
    output = Output(out, {"source model": checkpoint.fingerprint(), "format": name}, len(shards), resume=False)
    for number, names in enumerate(shards, 1):
        output.put(number, dict(_specs(checkpoint, names, formats, target)),
                   _tensors(checkpoint, names, formats, target), {})  # fmt: skip
    config = checkpoint.config | {"quantization_config": target.quantization_config(formats)}
    output.finish(config, {"exported from": directory.name, "format": name}, checkpoint.side_files())
    return out


def _shards(checkpoint: Checkpoint) -> list[list[str]]:
    """Modules whose tensors the source keeps together: names of linears and of other tensors."""
    shards: dict[Path, dict[str, None]] = {}
    packed = packed_linears(checkpoint)
    for name, entry in checkpoint.entries.items():
        owner = next(
            (linear for linear in packed if name.startswith(linear + ".") and not name.endswith(".bias")), name
        )
        shards.setdefault(entry.path, {})[owner] = None
    return [list(names) for _, names in sorted(shards.items())]


def _specs(
    checkpoint: Checkpoint, names: list[str], formats: dict[str, LinearFormat], target: Target
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        if name not in formats:
            entry = checkpoint.entry(name)
            yield name, torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            continue
        n, k = linear_shape(checkpoint, name)
        scheme = formats[name].scheme_object
        codes = torch.empty(n, k, dtype=scheme.code_dtype, device="meta")
        for part, spec in target.tensors(formats[name], codes, formats[name].parameters(n, k)).items():
            yield f"{name}.{part}", spec


def _tensors(
    checkpoint: Checkpoint, names: list[str], formats: dict[str, LinearFormat], target: Target
) -> Iterator[tuple[str, Tensor]]:
    for name in names:
        if name not in formats:
            yield name, checkpoint.read(name)
            continue
        linear = load_linear(checkpoint, name, formats[name], torch.device("cpu"))
        for part, tensor in target.tensors(formats[name], *linear.unpack()).items():
            yield f"{name}.{part}", tensor
