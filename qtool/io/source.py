"""A checkpoint to read from: where MODEL is, its config, and its tensors by name, loaded when
asked.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from qtool.errors import QtoolError
from qtool.io.safetensors import Entry, read, read_header

DEMO = Path(__file__).parent.parent / "demo"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: what belongs to a model beside its weights; never code
SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "generation_config.json",
    "chat_template*",
)

#: where GPTQ checkpoints have their configuration, the older ones only there
QUANTIZE_CONFIG = "quantize_config.json"
#: the same weights once more, in forms that other loaders read
OTHER_WEIGHTS = ["consolidated*", "*/*"]


def resolve(model: str, *, weights: bool = True) -> Path:
    """The directory of MODEL: ``demo``, a local directory, or a hub id (downloaded or cached).

    Args:
        weights: download the weights too, not only config.json.

    Raises:
        QtoolError: neither a directory nor reachable on the hub.
    """
    if model == "demo":
        return DEMO
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise QtoolError(f"{model}: no such model directory (a hub id looks like 'owner/name')")
    configs = ["config.json", QUANTIZE_CONFIG]
    return _download(model, ["*.safetensors", *configs, INDEX, *SIDE_FILES] if weights else configs)


def _download(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, allow_patterns=patterns, ignore_patterns=OTHER_WEIGHTS)
        )
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise QtoolError(
            f"{model} is not a local directory and could not be had from the hub ({type(error).__name__}: {reason}); "
            "pass the path of a downloaded model directory"
        ) from error


class Checkpoint:
    """A Hugging Face model directory with safetensors weights.

    Attributes:
        directory, config: the directory and the content of its config.json.
        entries: every tensor by name.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self.entries = self._entries()

    def _entries(self) -> dict[str, Entry]:
        index = self.directory / INDEX
        if not index.exists():
            if not (self.directory / SINGLE).exists():
                raise QtoolError(
                    f"{self.directory}: no {SINGLE} and no {INDEX}; {_what_is_there(self.directory)}"
                )
            return read_header(self.directory / SINGLE)
        weight_map = _json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise QtoolError(f"{index.name}: no weight_map in it")
        shards = {}
        for shard in sorted({str(shard) for shard in weight_map.values()}):
            if Path(shard).name != shard or not shard.endswith(".safetensors"):
                raise QtoolError(
                    f"{index.name}: {shard!r} is not a file name inside the model directory"
                )
            shards[shard] = read_header(self.directory / shard)
        for name, shard in weight_map.items():
            if name not in shards[shard]:
                raise QtoolError(f"{index.name}: {name} is said to be in {shard}, but is not there")
        return {name: shards[shard][name] for name, shard in weight_map.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def entry(self, name: str) -> Entry:
        """Where tensor ``name`` is.

        Raises:
            QtoolError: if the checkpoint has no such tensor.
        """
        if name not in self.entries:
            raise QtoolError(f"{self.directory}: tensor {name} is missing")
        return self.entries[name]

    def read(self, name: str, rows: slice | None = None, *, pinned: bool = False) -> Tensor:
        """Tensor ``name`` (or its rows), on CPU, in its stored dtype."""
        return read(self.entry(name), rows, pinned=pinned)

    def under(self, prefix: str) -> Iterator[str]:
        """Names of the tensors whose name begins with ``prefix.``."""
        return (name for name in self.entries if name.startswith(prefix + "."))

    def fingerprint(self) -> str:
        """A hash of the config and of every tensor's name, dtype, shape and place, and the files'
        sizes.

        Cheap (reads no weights); together with the files' modification times it tells a changed
        source.
        """
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name, entry in sorted(self.entries.items()):
            stat = entry.path.stat()
            facts = (
                name,
                str(entry.dtype),
                entry.shape,
                entry.path.name,
                entry.start,
                stat.st_size,
                stat.st_mtime_ns,
            )
            digest.update(repr(facts).encode())
        return digest.hexdigest()

    def side_files(self) -> list[Path]:
        """Tokenizer and generation files, to copy as they are."""
        return sorted(
            {p for pattern in SIDE_FILES for p in self.directory.glob(pattern) if p.is_file()}
        )


def read_config(directory: Path) -> dict[str, Any]:
    """The content of ``config.json``; its ``quantization_config`` may lie beside, as AutoGPTQ wrote
    it.

    Raises:
        QtoolError: missing, not JSON, or without ``model_type``.
    """
    path = directory / "config.json"
    if not path.is_file():
        if (directory / "adapter_config.json").is_file():
            raise QtoolError(
                f"{directory} is an adapter (LoRA), not a model; merge it into its base model first"
            )
        raise QtoolError(f"{directory}: no config.json; expected a Hugging Face model directory")
    config = _json(path)
    if not isinstance(config.get("model_type"), str):
        raise QtoolError(f"{path}: no model_type in it")
    config.pop("auto_map", None)  # names code beside the model, which is neither run nor copied
    if config.get("quantization_config", {}) is None:
        del config["quantization_config"]
    beside = directory / QUANTIZE_CONFIG
    if "quantization_config" not in config and beside.is_file():
        config["quantization_config"] = {"quant_method": "gptq"} | _json(beside)
    if not isinstance(config.get("quantization_config", {}), dict):
        raise QtoolError(f"{path}: its quantization_config is no object")
    return config


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise QtoolError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise QtoolError(f"{path}: a JSON object expected, found {type(value).__name__}")
    return value


def _what_is_there(directory: Path) -> str:
    if shards := sorted(p.name for p in directory.glob("*.safetensors")):
        return f"{shards[0]} is there, but not the index that says which tensor is where"
    pickles = [p.name for p in directory.glob("*.bin")] + [p.name for p in directory.glob("*.pth")]
    if pickles:
        return f"{pickles[0]} is a pickle, which qtool never reads: convert it to safetensors first"
    return "only safetensors checkpoints are read"
