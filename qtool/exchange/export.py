"""Writes a native checkpoint in another loader's format.

An export that cannot be exact says so in a note; nothing is quantized again in silence.

Everything that can be refused is refused from config.json alone, before any work. Then each linear
is converted and read back as its loader would read it, and the relative distance of the two weights
is recorded, 0 if they are equal. A killed export that is run again continues where it stopped; an
export to GGUF, which is one file, starts over.
"""

import math
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qtool
from qtool.errors import CheckFailed, Interrupted, QtoolError, checking, require_count
from qtool.exchange import export_formats
from qtool.exchange.convert import Conversion, Json, Metadata, Tensors, convert
from qtool.exchange.export_format import ExportFormat, Formats
from qtool.exchange.export_notes import export_notes
from qtool.exchange.exportable import exported_formats
from qtool.exchange.gguf.write import FILE, write_gguf
from qtool.format import LinearFormat, native_format
from qtool.format.stored_linears import linear_shape
from qtool.io.integrity import read_record, recorded_hashes
from qtool.io.model_card import ERRORS, exactness, results_in, weight_errors
from qtool.io.model_directory import provenance
from qtool.io.source import CARD, Checkpoint
from qtool.models import Family, Heads, family_of
from qtool.models.architecture import dtype_name
from qtool.models.auto import running
from qtool.models.parts import RowsOf
from qtool.models.torch_defaults import torch_defaults
from qtool.plugins import require_json, require_returned
from qtool.progress import Progress
from qtool.runtime.linear import QuantLinear
from qtool.runtime.packed_kv import NEUTRAL, SCALES, missing_kv_tensors
from qtool.runtime.read_linear import load_linear
from qtool.schemes import Params
from qtool.units import bytes_text


@dataclass
class Exported:
    """An export: its directory, errors and notes; it is a path-like object.

    Attributes:
        errors: relative Frobenius distance between the exported and the native weight, by linear.
        notes: a sentence for each other difference from the native model.
        nbytes: bytes of the native checkpoint's tensors, and of the export's.
        next_step: the command that serves the export, or what else runs it; empty if the format
            names none.
    """

    directory: Path
    format: str
    errors: dict[str, float]
    notes: list[str]
    nbytes: tuple[int, int]
    next_step: str

    def __fspath__(self) -> str:
        return str(self.directory)

    def as_dict(self) -> Json:
        """The result as plain data, for ``--json``."""
        return vars(self) | {"directory": str(self.directory), "nbytes": list(self.nbytes)}

    def __str__(self) -> str:
        lines = [str(self.directory), f"{self.format}: {exactness(self.errors)}"]
        before, after = self.nbytes
        lines[-1] += f"; {bytes_text(after)}, {after / before:.2f} times the native checkpoint"
        following = [f"next: {self.next_step}"] if self.next_step else []
        return "\n".join([*lines, *self.notes, *following])


@torch_defaults()
def export(
    directory: Path,
    name: str,
    out: Path,
    *,
    tensor_parallel: int = 1,
    progress: Progress | None = None,
) -> Exported:
    """Export the native checkpoint in ``directory`` to ``out`` in format ``name``.

    Args:
        tensor_parallel: number of GPUs that will share every linear; a linear that cannot be split
            is refused.
        progress: called after each shard with (done, total, notes).

    Raises:
        QtoolError: an unknown format, or a linear that the format cannot express (before any work).
        CheckFailed: a damaged file, or a scale that the format's dtype cannot hold.
    """
    require_count("--tensor-parallel", tensor_parallel)
    checkpoint = Checkpoint(directory)
    work = _Export(checkpoint, export_formats.get(name), tensor_parallel)
    if work.target.one_file:
        shards = [write_gguf(work, work.formats, work.facts(), out, progress)]
        after = (out / FILE).stat().st_size
    else:
        shards = convert(work, out, progress)
        after = Checkpoint(out).nbytes
    following = work.target.next_step.replace("DIR", shlex.quote(str(out)))
    nbytes = checkpoint.nbytes, after
    return Exported(out, name, weight_errors(shards), work.notes, nbytes, following)


class _Export(Conversion):
    """A native checkpoint on its way into the format ``target``."""

    def __init__(self, source: Checkpoint, target: ExportFormat, tensor_parallel: int) -> None:
        self.source, self.target, self.dtype = source, target, target.dtype
        native = native_format(source.config)
        self.family = family_of(source.config).named_as(dict(native.tower_names))
        self.all_formats = exported_formats(target, native, source.config, tensor_parallel)
        self.formats = {name: found for name, found in self.all_formats.items() if found}
        for tensor in missing_kv_tensors(native.kv, source.config, source.entries):
            raise CheckFailed(f"{tensor}: a tensor of the KV cache is missing")
        self.settings = self.family.settings(source.config)
        keeps = keeps_kv_scales(target, native.kv, self.family, self.settings)
        self.kv = native.kv if keeps else None
        self.pieces = _pieces(self.family)
        self.linear_specs = cache(partial(_specs, target))  # many linears have the same
        self.notes = export_notes(target, source, self.all_formats, native.kv, self.kv is not None)
        self.identity = {
            "source model": source.fingerprint(recorded_hashes(source.directory)),
            "format": target.name,
            "qtool version": qtool.__version__,
        }

    def owner(self, name: str) -> str | None:
        module, _, part = name.rpartition(".")
        if part in NEUTRAL:
            return None  # a scale of kv4: every engine makes its own 4-bit cache
        if part in SCALES:
            return f"{module}.{SCALES[0]}" if self.kv else None
        if parts := self.family.rows_on_disk.get(name):
            return self.pieces[parts[0].name][0].tensor
        return module if module in self.formats and part != "bias" else name

    def specs(self, owner: str) -> Tensors:
        if owner in self.formats:
            permuted = f"{owner}.permutation" in self.source
            kind = self.formats[owner], *linear_shape(self.source, owner), permuted
            with self._running("tensors", owner):
                made = self.linear_specs(*kind)
            yield from self._linear(owner, made)
        elif owner.endswith(SCALES):
            yield from self._kv(owner)
        else:
            yield from self._on_disk(super().specs, owner)

    def tensors(self, owner: str, notes: Json) -> Tensors:
        if owner in self.formats:
            yield from self._converted(owner, notes).items()
        elif owner.endswith(SCALES):
            yield from self._kv(owner)
        else:
            yield from self._on_disk(partial(super().tensors, notes=notes), owner)

    @torch.no_grad()
    def _converted(self, name: str, notes: Json) -> dict[str, Tensor]:
        """The export's tensors of a linear; the relative error of its weight goes into ``notes``.

        Raises:
            QtoolError: the format's functions fail, or the weight is not finite.
        """
        linear = load_linear(self.source, name, self.formats[name], torch.device("cpu"))
        codes, params = linear.unpack()
        ours = linear.weight_of(codes, params)  # before the format's functions get the codes
        with checking(name):
            with self._running("tensors", name):
                made = self.target.tensors(linear.format, codes, all_params(linear, params))
            stored = dict(self._linear(name, made))
        before = [tensor._version for tensor in made.values()]
        with self._running("weight", name):
            theirs = self.target.weight(linear.format, made, *codes.shape)
        require_returned(self.target, "weight", theirs, Tensor, f" for {name}", ours.shape)
        if before != [tensor._version for tensor in made.values()]:
            raise QtoolError(f"{self.target.name}: weight changes the tensors that it is given")
        norm = float(ours.norm().clamp(min=1e-30))
        # in place of ours: theirs may be one of the tensors that are written
        error = float(ours.sub_(theirs).norm()) / norm
        if not math.isfinite(error):
            raise QtoolError(f"{name}: {self.target.name} reads NaN or Inf from its tensors")
        notes.setdefault(ERRORS, {})[name] = error
        return stored

    def _running(self, function: str, owner: str) -> AbstractContextManager[None]:
        """Name ``function`` of the format and the linear ``owner`` in what it raises while open.

        The written shards are kept, as those of an interrupted export are.
        """
        return running(fails=f"{self.target.name}: {function} fails for {owner}", kind=Interrupted)

    def _linear(self, name: str, stored: dict[str, Tensor]) -> Tensors:
        """The tensors ``stored`` of a linear, by their names in the export."""
        disk = self.family.disk_name(name)
        stored = require_returned(self.target, "tensors", stored, dict)
        for part, tensor in stored.items():
            require_returned(self.target, "tensors", tensor, Tensor, f" for {part!r}")
        if "bias" in stored and f"{name}.bias" in self.source:
            raise QtoolError(
                f"{self.target.name}: tensors returns a bias for {name}, whose own bias is stored"
                " under that name"
            )
        for part, tensor in stored.items():
            yield f"{disk}.{part}", tensor

    def _on_disk(self, read: Callable[[str], Tensors], owner: str) -> Tensors:
        """The tensors that ``read`` returns for ``owner``, by the names of published checkpoints.

        If a published tensor joins ``owner`` with other tensors, it is returned whole.
        """
        parts = self.family.rows_on_disk.get(owner)
        if parts is None:
            for name, tensor in read(owner):
                yield self.family.disk_name(name), tensor
            return

        @cache
        def rows(tensor: str) -> Tensor:
            ((_, found),) = read(tensor)
            return found.flatten(0, 1) if found.dim() == 3 else found

        for disk, part in {part.name: part for part in parts}.items():
            yield disk, _joined(part, self.pieces[disk], rows)

    def _kv(self, name: str) -> Tensors:
        """The export's scales for the KV cache of the attention that has the scale ``name``."""
        attention = name.rpartition(".")[0]
        scales = [self.source.read(f"{attention}.{scale}") for scale in SCALES]
        block, module = self.family.place(attention)
        assert block is not None
        own = self.family.at(self.settings, block)
        inside = (t.removeprefix(f"{module}.") for t in own.tensors if t.startswith(f"{module}."))
        weight = next(tensor for tensor in inside if tensor.endswith(".weight"))
        published = self.family.published_names(f"{attention}.{weight.removesuffix('.weight')}")[0]
        disk = published.rsplit(".", weight.count("."))[0]
        for part, tensor in self.target.kv_tensors(*scales).items():
            yield f"{disk}.{part}", tensor

    def metadata(self) -> Metadata:
        named = {
            published: found
            for name, found in self.all_formats.items()
            for published in self.family.published_names(name)
        }
        if self.target.read_by_transformers:
            head = {self.family.head} - {"lm_head"}  # which every format names
            named |= self.all_formats | dict.fromkeys(head)
        quantization = self.target.quantization_config(named | self._looked_up(named), self.kv)
        quantization = require_returned(self.target, "quantization_config", quantization, dict)
        require_json(quantization, f"{self.target.name}: its quantization_config")
        config = self.source.config | {"quantization_config": quantization}
        if quantization.get("kv_cache_scheme"):
            # the loader of such scales asks for this number, which OPT's config does not have
            heads = Heads.of(self.settings)
            config.setdefault("num_key_value_heads", heads.kv)
        if self.target.dtype is not None:
            config["dtype"] = dtype_name(self.target.dtype)
            config.pop("torch_dtype", None)
        copy = self.target.config_copy
        return Metadata(config, self.facts(), {copy: quantization} if copy else {})

    def facts(self) -> Json:
        """The provenance of the export."""
        native = provenance(self.source.directory)
        return {
            "source": read_record(self.source.directory).get("source", {}),
            "results": _results(self.source.directory),
            "exported from": native.get("hub id", native["directory"]),
            "loaders": self.target.about,
            "next step": self.target.next_step,
            "format": self.target.name,
            "notes": self.notes,
        }

    def _looked_up(self, named: Formats) -> dict[str, LinearFormat | None]:
        """The first experts' formats by the names at which vLLM 0.26 looks for all experts'."""
        experts, found = self.family.experts, {}
        leaves = (experts.gate, experts.up, experts.down) if experts else ()
        for leaf, theirs in zip(leaves, ("gate_proj", "up_proj", "down_proj"), strict=False):
            for name in named:
                if leaf and name.endswith(f".experts.0.{leaf}"):
                    found[name.removesuffix(leaf) + theirs] = named[name]
        return found


def all_params(linear: QuantLinear, params: Params) -> Params:
    """The unpacked ``params`` of ``linear`` for :meth:`ExportFormat.tensors`."""
    if linear.permutation is None:
        return params
    return params | {"permutation": linear.permutation}


def _specs(
    target: ExportFormat, linear_format: LinearFormat, n: int, k: int, permuted: bool
) -> dict[str, Tensor]:
    """What ``target`` stores of a weight ``[n, k]``, on ``meta``."""
    codes = torch.empty(n, k, dtype=linear_format.scheme_object.code_dtype, device="meta")
    params = linear_format.parameters(n, k)
    if permuted:
        params["permutation"] = torch.empty(k, dtype=torch.int32, device="meta")
    return target.tensors(linear_format, codes, params)


@dataclass
class _Piece:
    """Rows of ``tensor`` from ``start`` on, which are the rows ``places`` of a tensor on disk."""

    tensor: str
    start: int
    places: Sequence[int]


def _pieces(family: Family) -> dict[str, list[_Piece]]:
    """The pieces of each tensor on disk that loaders split or join."""
    found: dict[str, list[_Piece]] = {}
    for own, parts in family.rows_on_disk.items():
        start = 0
        for part in parts:
            places = range(part.count) if part.rows is None else part.rows
            found.setdefault(part.name, []).append(_Piece(own, start, places))
            start += part.count
    return found


def _joined(part: RowsOf, pieces: Sequence[_Piece], rows: Callable[[str], Tensor]) -> Tensor:
    """The whole tensor ``part.name`` on disk; ``rows`` gives those of our tensors, by name."""
    whole = torch.cat([rows(p.tensor)[p.start : p.start + len(p.places)] for p in pieces])
    if not whole.is_meta:
        places = [place for piece in pieces for place in piece.places]
        whole = whole[torch.tensor(places).argsort()]
    if part.matrices:
        whole = whole.unflatten(0, (part.matrices, -1))
    return whole.T.contiguous() if part.transposed else whole


def keeps_kv_scales(target: ExportFormat, kv: str | None, family: Family, settings: Any) -> bool:
    """Whether the calibrated scales of the cache ``kv`` go into the file.

    vLLM finds them only by the name ``self_attn``; its Falcon fails at any other name.

    Raises:
        QtoolError: the ``kv_tensors`` of ``target`` are no tensors by name.
    """
    scales = torch.ones(1, 1, device="meta")
    stored = require_returned(
        target, "kv_tensors", target.kv_tensors(scales, scales), dict[str, Tensor]
    )
    caches = (own.kv_cache for own in family.of_blocks(settings))
    return (
        kv == "kv8"
        and {cache.module for cache in caches if cache} == {"self_attn"}
        and bool(stored)
    )


def _results(native: Path) -> str:
    """The evaluation results in the model card of ``native``."""
    card = native / CARD
    return results_in(card.read_bytes().decode(errors="replace")) if card.is_file() else ""
