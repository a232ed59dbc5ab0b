"""Writes a native checkpoint as one GGUF file with llama.cpp's ``gguf`` package.

Names, hyper-parameters and tokenizer are llama.cpp's. The file holds the experts of a block as one
stack [E, N, K], which is written once the last expert has been read.
"""

import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.exchange.convert import Conversion, Json, shards_of
from qtool.exchange.export_format import Formats
from qtool.exchange.gguf.architectures import (
    ARCHITECTURES,
    as_stored,
    rope_factors,
    settings_of,
    write_hyper_parameters,
)
from qtool.exchange.gguf.tokenizer import write_tokenizer
from qtool.io.integrity import RECORD, hashes_to_check, read_record, require_file_intact
from qtool.io.model_card import model_card
from qtool.io.output import LOCK, lock, require_new, require_own
from qtool.io.safetensors import copy, space_for, write_json, write_text
from qtool.io.source import BASE_CARD, CARD
from qtool.models import Family, family_of
from qtool.progress import Progress

FILE = "model.gguf"
#: GGUF's names of the block types by scheme, and of the dtypes of plain tensors
KINDS = {"w4a16": "Q4_0", "w4a16-24": "Q4_0", "w8a8": "Q8_0"}
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
EXPERT = re.compile(r"\.experts\.(\d+)\.")


def require_gguf() -> Any:
    """The ``gguf`` package.

    Raises:
        QtoolError: the package is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise QtoolError(
            "GGUF files are written by the gguf package: pip install 'qtool[gguf]'"
        ) from None
    return gguf


def write_gguf(
    work: Conversion, formats: Formats, facts: Json, out: Path, progress: Progress | None
) -> Json:
    """Write ``work``'s source into ``out``, as ``model.gguf`` with its model card and qtool.json.

    A finished export is not done again.

    Args:
        formats: formats of the packed linears, by name.
        facts: content for qtool.json.

    Returns:
        The notes of the tensors.

    Raises:
        QtoolError: ``out`` cannot become a result, another export works on it, the source changed
            meanwhile, or the gguf package is not installed.
        CheckFailed: a damaged source, or a scale that float16 does not hold.
    """
    package, begun = require_gguf(), work.source.fingerprint()
    if (made := read_record(out)).get("job") == work.identity:
        (out / LOCK).unlink(missing_ok=True)  # killed after the directory took its name
        return dict(made["blocks"][0])
    require_new(out)
    # not OUT.partial, which a killed run may have left and would continue from
    partial = out.with_name(f"{out.name}.gguf.partial")
    require_own(partial, partial / LOCK)
    partial.mkdir(parents=True, exist_ok=True)
    with lock(partial / LOCK, partial):
        for left in partial.iterdir():
            if left.name != LOCK:
                left.unlink()  # a killed export left it, and the result would have it
        try:
            with space_for(out / FILE):
                notes = _write(package, partial / FILE, work, formats, progress)
                with (partial / FILE).open("rb") as written:
                    os.fsync(written.fileno())  # before the directory takes its name
            work.source.require_unchanged(begun)
            for name, file in work.source.side_files().items():
                if name == BASE_CARD or name.startswith(("LICEN", "NOTICE", "USE_POLICY")):
                    copy(file, partial / name)
            provenance = facts | {"blocks": [notes], "job": work.identity}
            write_text(partial / CARD, model_card(provenance, partial / BASE_CARD))
            write_json(partial / RECORD, provenance)
            partial.rename(out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    (out / LOCK).unlink(missing_ok=True)  # the same export, begun again, removes it too
    return notes


@dataclass
class _Stored:
    """A tensor of the GGUF file.

    ``owners`` are the tensors that it is made of, by the expert's number if it is a stack, else
    only number 0; ``shape`` is that of one in bytes. ``file`` is the source file of the last one.
    """

    kind: str
    stacked: bool
    shape: tuple[int, ...] = ()
    owners: dict[int, str] = field(default_factory=dict)
    file: Path = Path()

    @property
    def whole(self) -> tuple[int, ...]:
        """The shape in bytes."""
        return (len(self.owners), *self.shape) if self.stacked else self.shape


def _write(
    package: Any, path: Path, work: Conversion, formats: Formats, progress: Progress | None
) -> Json:
    """Write the file, tensor by tensor; returns the notes of the tensors."""
    notes = dict[str, Any]()
    settings = settings_of(work.source.config)
    arch = ARCHITECTURES[settings.model_type].name
    shards, recorded = shards_of(work), hashes_to_check(work.source.directory)
    architecture = next(a for a, name in package.MODEL_ARCH_NAMES.items() if name == arch)
    names = package.get_tensor_name_map(architecture, settings.num_hidden_layers)
    tensors = _tensors(work, shards, formats, names, settings)
    by_file = {
        file: {name: stored for name, stored in tensors.items() if stored.file == file}
        for file in shards
    }
    writer = package.GGUFWriter(path, arch)
    write_hyper_parameters(package, writer, settings)
    write_tokenizer(package, writer, work.source.directory, settings.vocab_size)
    for some in by_file.values():
        for name, stored in some.items():
            _announce(package, writer, name, stored.whole, stored.kind)
    if (factors := rope_factors(settings)) is not None:
        _announce(package, writer, "rope_freqs.weight", _bytes(factors).shape, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for number, (file, some) in enumerate(by_file.items(), 1):
        require_file_intact(file, recorded.get(file.name))
        for stored in some.values():
            parts = [
                _read(work, owner, settings, notes) for _, owner in sorted(stored.owners.items())
            ]
            data = torch.stack(parts) if stored.stacked else parts[0]
            writer.write_tensor_data(data.numpy())
        if progress:
            progress(number, len(shards), {})
    if factors is not None:
        writer.write_tensor_data(_bytes(factors).numpy())
    writer.close()
    return notes


def _tensors(
    work: Conversion, shards: Mapping[Path, list[str]], formats: Formats, names: Any, settings: Any
) -> dict[str, _Stored]:
    """The tensors of the file by name, made of the owners in ``shards``.

    Raises:
        QtoolError: llama.cpp's model lacks a tensor of the checkpoint.
    """
    tensors: dict[str, _Stored] = {}
    family = family_of(work.source.config)
    for file, owners in shards.items():
        for owner in owners:
            packed = formats.get(owner)
            own = f"{owner}.weight" if packed else owner
            if own in family.outside:
                continue  # a tensor of a tower
            expert = EXPERT.search(own)
            asked = EXPERT.sub(".experts.", _in_a_text_model(own, family))
            found = names.get_name(asked, try_suffixes=(".weight", ".bias"))
            if found is None:
                raise QtoolError(f"{own}: llama.cpp's {settings.model_type} has no such tensor")
            ((_, spec),) = work.specs(owner)
            data = as_stored(own, spec, settings)
            kind = KINDS[packed.scheme] if packed else DTYPES[data.dtype]
            stored = tensors.setdefault(found, _Stored(kind, stacked=expert is not None))
            stored.shape, stored.file = tuple(_bytes(data).shape), file
            stored.owners[int(expert[1]) if expert else 0] = owner
    return tensors


def _in_a_text_model(name: str, family: Family) -> str:
    """The name of a tensor in the text model alone, without the wrapper around it."""
    decoder = family.blocks.rpartition(".")[0]
    for own, alone in ((family.head, "lm_head"), (decoder, "model")):
        if name.startswith(f"{own}."):
            return alone + name.removeprefix(own)
    return name


def _read(work: Conversion, owner: str, settings: Any, notes: Json) -> Tensor:
    """The bytes of the tensor that the export makes of ``owner``."""
    ((own, tensor),) = work.tensors(owner, notes)  # the published name ends as the native one
    return _bytes(as_stored(own, tensor, settings))


def _announce(package: Any, writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    """Announce to ``writer`` a tensor that will follow."""
    quantization = package.GGMLQuantizationType[kind]
    writer.add_tensor_info(name, shape, np.dtype(np.uint8), math.prod(shape), quantization)


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes of ``tensor`` as uint8, with a longer last dimension."""
    return tensor.contiguous().view(torch.uint8)
