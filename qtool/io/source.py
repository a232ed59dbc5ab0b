"""A checkpoint to read from: the directory of MODEL, its config, and its tensors by name.

A tensor is read when it is asked for.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtool.errors import QtoolError, in_one_line, refuse_pipe, require_path
from qtool.io.dequantize import FloatFormat, dequantized, published
from qtool.io.integrity import INDEX, RECORD
from qtool.io.safetensors import Entry, read, read_header
from qtool.models.architecture import DTYPES, own_dtype, with_text_config

if TYPE_CHECKING:
    from qtool.io.adapter import Adapter

DEMO = Path(__file__).parent.parent / "demo"
SINGLE = "model.safetensors"
#: files that belong to a model besides its weights
SIDE_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "generation_config.json",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "USE_POLICY*",
    "README.md",
)
#: endings of code and of pickles, which are never copied
NEVER_CARRIED = {".py", ".pyc", ".so", ".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy"}
#: the name of a native checkpoint's model card, and of the source's card in it
CARD, BASE_CARD = "README.md", "README.base.md"

#: the configuration file of GPTQ checkpoints; older ones have no other configuration
QUANTIZE_CONFIG = "quantize_config.json"
#: duplicates of the weights, in forms and in folders that other loaders read
OTHER_WEIGHTS = ["consolidated*", "*/*.safetensors", "original/*"]


def resolve(model: str, *, weights: bool = True, files: list[str] | None = None) -> Path:
    """The directory of MODEL: ``demo``, a local directory, or a hub id (downloaded or cached).

    Args:
        weights: download the weights too, not only config.json.
        files: download these files instead.

    Raises:
        QtoolError: MODEL is neither a directory nor reachable on the hub.
    """
    if model == "demo":
        return DEMO
    path = require_path("model", model)
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        raise QtoolError(_gguf(path))
    if path.is_file():
        raise QtoolError(f"{model} is a file: the directory of a model or a hub id is expected")
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise QtoolError(f"{model}: no such directory (a hub id looks like 'owner/name')")
    configs = ["config.json", RECORD, QUANTIZE_CONFIG]
    all_files = ["*.safetensors", *configs, INDEX, *SIDE_FILES]
    return _download(model, files or (all_files if weights else configs))


def directory_of(model: str | PathLike[str], *, weights: bool = True) -> Path:
    """The directory of ``model``: a path itself, or the result of :func:`resolve` for a text.

    Raises:
        QtoolError: ``model`` is neither a path nor a text.
    """
    if isinstance(model, str):
        return resolve(model, weights=weights)
    return require_path("model", model)


def _download(model: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, allow_patterns=patterns, ignore_patterns=OTHER_WEIGHTS)
        )
    except Exception as error:
        owner, _, name = model.partition("/")
        here = "is not a local directory and"
        if Path(owner).is_dir():
            here = f"does not exist: {owner} has no directory {name}; as a hub id it"
        raise QtoolError(
            f"{model} {here} could not be had from the hub "
            f"({type(error).__name__}: {in_one_line(error)}); pass the path of a "
            "downloaded model directory"
        ) from error


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
    """

    def __init__(self, directory: Path, adapter: "Adapter | None" = None) -> None:
        self.directory, self.adapter = directory, adapter
        self._config = read_config(directory)
        self.config, self.published = plain_config(self._config)
        self._stored = self._entries()
        self.nbytes = sum(entry.nbytes for entry in self._stored.values())
        self.entries = dict(self._stored)
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
                    f"{self.directory}: no {SINGLE} and no {INDEX}; "
                    f"{_what_is_there(self.directory)}"
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

    def under(self, prefix: str) -> Iterator[str]:
        """Names of the tensors whose name begins with ``prefix.``."""
        return (name for name in self.entries if name.startswith(prefix + "."))

    def fingerprint(self) -> str:
        """A hash of the config and of the names, shapes and places of the tensors.

        It reads no weights. Together with the files' modification times it detects a changed
        source.
        """
        digest = hashlib.sha256(json.dumps(self._config, sort_keys=True).encode())
        if self.adapter:
            digest.update(repr(self.adapter.hashes).encode())
        for name, entry in sorted(self._stored.items()):
            stat = entry.path.stat()
            place = entry.path.name, entry.start, stat.st_size, stat.st_mtime_ns
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
            notes.append(f"the adapter {self.adapter.directory.name} is merged into the weights")
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
        raise QtoolError(_no_config(directory))
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


def _no_config(directory: Path) -> str:
    """Why ``directory``, which has no ``config.json``, is not read."""
    if (directory / "adapter_config.json").is_file():
        return (
            f"{directory} is an adapter (LoRA), not a model: pass its base model, and it as "
            "--adapter"
        )
    if files := sorted(directory.glob("*.gguf")):
        return _gguf(files[0])
    return f"{directory}: no config.json; expected a Hugging Face model directory"


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


def provenance(directory: Path) -> dict[str, str]:
    """The name of a model's directory, and its hub id if it has one."""
    name = directory.parent.parent.name  # models--owner--name/snapshots/<commit>, the hub's cache
    if directory.parent.name != "snapshots" or not name.startswith("models--"):
        return {"directory": directory.name}
    hub_id = name.removeprefix("models--").replace("--", "/")
    return {"directory": hub_id.split("/")[-1], "hub id": hub_id}


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
    except (ValueError, OSError, RecursionError) as error:
        raise QtoolError(f"{path}: not readable as JSON ({error})") from error
    if not isinstance(value, dict):
        raise QtoolError(f"{path}: a JSON object expected, found {type(value).__name__}")
    return value


def _what_is_there(directory: Path) -> str:
    if shards := sorted(p.name for p in directory.glob("*.safetensors")):
        return f"{shards[0]} is there, but not the index that says which tensor is where"
    if files := sorted(directory.glob("*.gguf")):
        return _gguf(files[0])
    pickles = [p.name for p in directory.glob("*.bin")] + [p.name for p in directory.glob("*.pth")]
    found = f"{pickles[0]} is a pickle, which qtool never reads" if pickles else "no weights"
    return f"{found}; a pytorch_model.bin is converted by: {_conversion(directory)}"


def _gguf(path: Path) -> str:
    """Advice for a GGUF file."""
    more = f", gguf_file={path.name!r}"
    return (
        f"{path.name} is GGUF, llama.cpp's format, which qtool does not read: take the model's "
        "original safetensors, or convert it (after pip install gguf): "
        + _conversion(path.parent, more, ", quantization_config=t.GgufConfig(dequantize=True)")
    )


def _conversion(directory: Path, more: str = "", how: str = "") -> str:
    """The command by which transformers converts a directory to a safetensors checkpoint.

    Args:
        more: arguments of ``from_pretrained`` that select the file to read.
        how: arguments that say how to read the weights.
    """
    hub_id = provenance(directory).get("hub id")  # its other weights were not downloaded
    model = hub_id or str(directory)
    out = f"{hub_id.split('/')[-1] if hub_id else model}-safetensors"
    return (
        'python -c "import transformers as t; '
        f"m = t.AutoModelForCausalLM.from_pretrained({model!r}{more}{how}); m.hf_quantizer = None; "
        f"m.save_pretrained({out!r}); "
        f't.AutoTokenizer.from_pretrained({model!r}{more}).save_pretrained({out!r})"'
    )
