"""A checkpoint to read from: its config, and its tensors by name.

A tensor is read when it is asked for.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtool.errors import QtoolError, refuse_pipe
from qtool.io.dequantize import dequantized, published
from qtool.io.dequantize.published import FloatFormat
from qtool.io.integrity import INDEX
from qtool.io.model_directory import (
    QUANTIZE_CONFIG,
    SIDE_FILES,
    no_config,
    provenance,
    what_is_there,
)
from qtool.io.safetensors import Entry, read, read_header
from qtool.models.architecture import DTYPES, own_dtype, with_text_config

if TYPE_CHECKING:
    from qtool.io.adapter import Adapter

SINGLE = "model.safetensors"
#: endings of code and of pickles, which are never copied
NEVER_CARRIED = {".py", ".pyc", ".so", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy"}
#: the name of a native checkpoint's model card, and of the source's card in it
CARD, BASE_CARD = "README.md", "README.base.md"


class Checkpoint:
    """A Hugging Face model directory with safetensors weights.

    Weights in FP8, MXFP4 or NVFP4 are dequantized when they are read
    (:mod:`qtool.io.dequantize`): config and entries are those of the plain model.

    Attributes:
        directory: directory of the model.
        config: content of its config.json.
        entries: every tensor by name.
        nbytes: bytes of the tensors in the files.
        published: the format of the weights if they are dequantized, else None.
        adapter: the adapter that is merged, or None.
        tower_names: names of a tower's tensors in the files, by their names in the model, where
            transformers would write other names; a module stands for its tensors where that is
            enough. :func:`qtool.io.source_names.adopt` fills it.
    """

    def __init__(self, directory: Path, adapter: "Adapter | None" = None) -> None:
        self.directory, self.adapter = directory, adapter
        self._config = read_config(directory)
        self.config, self.published = plain_config(self._config)
        self._stored = self._entries()
        self.nbytes = sum(entry.nbytes for entry in self._stored.values())
        self.entries = dict(self._stored)
        self.tower_names: dict[str, str] = {}
        if self.published:
            self.entries = dequantized(self._stored, self.published, self.config)
        blocks = self.config.get("num_hidden_layers")
        if isinstance(blocks, int) and blocks > len(self.entries):
            raise QtoolError(
                f"{directory}: config.json has {blocks} hidden layers, more than there are tensors"
                f" in the files ({len(self.entries)})"
            )

    def _entries(self) -> dict[str, Entry]:
        index = self.directory / INDEX
        if not os.path.lexists(index):  # a link to nothing is one to a file that is missing
            if not os.path.lexists(self.directory / SINGLE):
                raise QtoolError(
                    f"{self.directory}: no {SINGLE} and no {INDEX}; {what_is_there(self.directory)}"
                )
            return read_header(self.directory / SINGLE)
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise QtoolError(f"{index.name}: no weight_map in it")
        shards, files = {}, set(map(str, weight_map.values()))
        if files != {SINGLE} and (self.directory / SINGLE).exists():
            raise QtoolError(
                f"{self.directory}: transformers reads {SINGLE} there, other programs the files "
                f"that {INDEX} lists: remove the one or the others"
            )
        for shard in sorted(files):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise QtoolError(
                    f"{index.name}: {shard!r} is not a file name inside the model directory"
                )
            shards[shard] = read_header(self.directory / shard)
        for name, shard in weight_map.items():
            if name not in shards[str(shard)]:
                raise QtoolError(f"{index.name}: {name} is said to be in {shard}, but is not there")
        for shard, entries in shards.items():
            if unlisted := next((n for n in entries if weight_map.get(n) != shard), None):
                raise QtoolError(
                    f"{index.name} does not list {unlisted} of {shard}, which transformers reads "
                    "and other programs do not: list it, or remove it from the file"
                )
        return {name: shards[str(shard)][name] for name, shard in weight_map.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def entry(self, name: str) -> Entry:
        """The place of tensor ``name`` in its file.

        Raises:
            QtoolError: the checkpoint has no such tensor.
        """
        if name not in self.entries:
            raise QtoolError(f"{self.directory}: tensor {name} is missing")
        return self.entries[name]

    def read(self, name: str, rows: slice | None = None, *, pinned: bool = False) -> Tensor:
        """Tensor ``name`` (or its ``rows``) on the CPU, in its stored dtype."""
        return read(self.entry(name), rows, pinned=pinned)

    def fingerprint(self, recorded: Mapping[str, str] | None = None) -> str:
        """A hash of the config, of the tensors' names, shapes and places, and of the files' times.

        It reads no weights: a file that was written again counts as changed. A file that has a
        ``recorded`` hash, by name, counts by that hash instead of its time.
        """
        recorded = recorded or {}
        digest = hashlib.sha256(json.dumps(self._config, sort_keys=True).encode())
        if self.adapter:
            digest.update(repr(self.adapter.hashes).encode())
        files = {}
        for path in {entry.path for entry in self._stored.values()}:
            stat = path.stat()
            files[path] = stat.st_size, recorded.get(path.name, stat.st_mtime_ns)
        for name, entry in sorted(self._stored.items()):
            place = entry.path.name, entry.start, *files[entry.path]
            facts = name, str(entry.dtype), entry.shape, *place
            digest.update(repr(facts).encode())
        return digest.hexdigest()

    def require_unchanged(self, fingerprint: str) -> None:
        """Check that the files still have the ``fingerprint`` from before reading.

        Raises:
            QtoolError: the files changed, so that the tensors read may belong to two models.
        """
        if self.fingerprint() != fingerprint:
            raise QtoolError(
                f"{self.directory} changed while it was read, so that the result may be of two "
                "models: leave its files as they are and begin again"
            )

    def identity(self) -> dict[str, Any]:
        """The source's provenance: directory, hub id if it has one, fingerprint.

        It also names the format from which weights were dequantized, and the merged adapter.
        """
        facts: dict[str, Any] = {**provenance(self.directory), "fingerprint": self.fingerprint()}
        if self.published:
            facts["dequantized from"] = self.published.about
        if self.adapter:
            facts["adapter"] = self.adapter.identity()
        return facts

    @property
    def notes(self) -> list[str]:
        """A sentence for each way in which the weights differ from those in the files."""
        notes = [dequantized_note(self.published)] if self.published else []
        if self.adapter:
            name = provenance(self.adapter.directory)["directory"]
            notes.append(f"the adapter {name} is merged into the weights")
        return notes

    def side_files(self) -> dict[str, Path]:
        """Files that a result copies (tokenizer, templates, license), by their names in it.

        The model card is kept as ``README.base.md``. Code and pickles are left behind.
        """
        found = {
            path.relative_to(self.directory).as_posix(): path
            for pattern in SIDE_FILES
            for path in sorted(self.directory.glob(pattern))
            if path.is_file() and not NEVER_CARRIED.intersection(path.suffixes)
        }
        card, base = found.pop(CARD, None), self.directory / BASE_CARD
        if base.is_file():
            card = base
        return found | ({BASE_CARD: card} if card else {})


def read_config(directory: Path) -> dict[str, Any]:
    """The content of ``config.json``.

    Its ``quantization_config`` may be in a separate file, as AutoGPTQ wrote it.

    Raises:
        QtoolError: the file is missing, is not JSON, has no ``model_type``, or names another file
            of weights or a dtype that no weights have.
    """
    path = directory / "config.json"
    if not path.exists():
        raise QtoolError(no_config(directory))
    config = read_json(path)
    if not isinstance(config.get("model_type"), str):
        raise QtoolError(f"{path}: no model_type in it")
    _require_readable_weights(config, path)
    config.pop("auto_map", None)  # it names code beside the model, which is not run or copied
    config.pop("transformers_weights", None)  # a native checkpoint has its notice here
    if config.get("quantization_config", ...) in (None, {}):
        del config["quantization_config"]
    beside = directory / QUANTIZE_CONFIG
    if "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = {"quant_method": "gptq"} | read_json(beside)
    if not isinstance(config.get("quantization_config", {}), dict):
        raise QtoolError(f"{path}: its quantization_config is no object")
    return config


def _require_readable_weights(config: dict[str, Any], path: Path) -> None:
    """Refuse a dtype that no weights have, and weights under a name that qtool does not read."""
    for name, part in with_text_config(config).items():
        dtype, whose = own_dtype(part), f"{name}'s " if name else ""
        if dtype and getattr(torch, dtype, None) not in DTYPES.values():
            raise QtoolError(
                f"{path}: its {whose}dtype is {dtype!r}; weights in one of {', '.join(DTYPES)}, "
                "and their dtype there, are expected"
            )
    named = config.get("transformers_weights")
    endings = (".safetensors", ".safetensors.index.json")
    if str(named).endswith(endings) and named not in (SINGLE, INDEX):
        raise QtoolError(
            f"{path}: its transformers_weights names {named}, which transformers reads instead of "
            f"{SINGLE}: give the weights that name in a directory of their own, with a config.json "
            "that names none"
        )


def plain_config(config: dict[str, Any]) -> tuple[dict[str, Any], FloatFormat | None]:
    """The plain model's config and the published format, if the weights are dequantized.

    Otherwise it is ``config`` itself, and None.

    Raises:
        QtoolError: a known format has unknown settings.
    """
    if (found := published(config)) is None:
        return config, None
    return {key: value for key, value in config.items() if key != "quantization_config"}, found


def dequantized_note(found: FloatFormat) -> str:
    """A sentence about weights in the format ``found``."""
    return f"the weights are {found.about}, dequantized when they are read"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        QtoolError: it is no file, cannot be read, is not UTF-8 without a byte order mark, which is
            all that transformers reads, or holds something else.
    """
    try:
        refuse_pipe(path)
        content = path.read_bytes()
        if (encoding := json.detect_encoding(content)) != "utf-8":
            raise QtoolError(
                f"{path}: its encoding is {encoding}, which transformers cannot read: save it as "
                "UTF-8 without a byte order mark"
            )
        value = json.loads(content)
    except OSError as error:
        raise QtoolError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise QtoolError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise QtoolError(f"{path}: a JSON object expected, found {type(value).__name__}")
    return value
