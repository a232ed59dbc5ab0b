"""The directory of MODEL, and advice for one that holds nothing that qtool reads."""

from os import PathLike
from os.path import abspath
from pathlib import Path

from qtool.errors import QtoolError, in_one_line, require_path
from qtool.io.integrity import INDEX, RECORD

DEMO = Path(__file__).parent.parent / "demo"
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
#: the configuration file of GPTQ checkpoints; older ones have no other configuration
QUANTIZE_CONFIG = "quantize_config.json"
#: weights in forms that qtool does not read
UNREAD_WEIGHTS = ("*.gguf", "*.bin", "*.pth")
#: duplicates of the weights, in forms and in folders that other loaders read
OTHER_WEIGHTS = ["consolidated*", "*/*.safetensors", "original/*"]
#: patterns of files; each tokenizer has at least one of them
TOKENIZERS = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "tekken.json")


def directory_of(
    model: str | PathLike[str], *, weights: bool = True, files: list[str] | None = None
) -> Path:
    """The directory of ``model``.

    Args:
        model: a path, which is the directory itself; or a text: ``demo``, the name of a directory,
            or a hub id (downloaded or cached).
        weights: download the weights too, not only config.json.
        files: download these files instead.

    Raises:
        QtoolError: ``model`` is neither a path nor a text; or the text is neither a directory nor
            reachable on the hub, or names an unfinished run.
    """
    if model == "demo":
        return DEMO
    path = require_path("model", model)
    if not isinstance(model, str) or path.is_dir():
        return path
    if unfinished := _unfinished(path):
        raise QtoolError(unfinished)
    if path.suffix == ".gguf":
        raise QtoolError(_gguf(path))
    if path.is_file():
        config = "" if weights else ", a file named config.json"
        raise QtoolError(
            f"{model} is a file: the directory of a model{config} or a hub id is expected"
        )
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise QtoolError(f"{model}: no such directory (a hub id looks like 'owner/name')")
    configs = ["config.json", RECORD, QUANTIZE_CONFIG]
    all_files = ["*.safetensors", *configs, INDEX, *SIDE_FILES]
    return _download(model, files or (all_files if weights else configs))


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
            f"{model} {here} could not be downloaded from the hub "
            f"({type(error).__name__}: {in_one_line(error)}); pass the path of a "
            "downloaded model directory"
        ) from error


def provenance(directory: Path) -> dict[str, str]:
    """The name of a model's directory, ``.`` too, and its hub id if it has one."""
    directory = Path(abspath(directory))  # a link is named, not what it leads to
    name = directory.parent.parent.name  # models--owner--name/snapshots/<commit>, the hub's cache
    if directory.parent.name != "snapshots" or not name.startswith("models--"):
        return {"directory": directory.name}
    hub_id = name.removeprefix("models--").replace("--", "/")
    return {"directory": hub_id.split("/")[-1], "hub id": hub_id}


def has_tokenizer(directory: Path) -> bool:
    """Whether a file of a tokenizer is in ``directory``."""
    return any(any(directory.glob(name)) for name in TOKENIZERS)


def require_tokenizer(directory: Path) -> None:
    """Refuse a model directory without a tokenizer."""
    if not has_tokenizer(directory):
        raise QtoolError(
            f"{directory}: there is no tokenizer (no {', no '.join(TOKENIZERS)}): copy that of the "
            "model there"
        )


def no_config(directory: Path) -> str:
    """Why ``directory``, which has no ``config.json``, is not read."""
    if unfinished := _unfinished(directory):
        return unfinished
    if (directory / "adapter_config.json").is_file():
        return (
            f"{directory} is an adapter (LoRA), not a model: pass its base model, and it as "
            "--adapter"
        )
    if files := sorted(directory.glob("*.gguf")):
        return _gguf(files[0])
    return f"{directory}: no config.json; expected a Hugging Face model directory"


def _unfinished(path: Path) -> str:
    """What to do if ``path`` is, or will be, the directory of an unfinished run; else empty."""
    partial = path if path.suffix == ".partial" else Path(f"{path}.partial")
    if not partial.is_dir():
        return ""
    return (
        f"{partial} is an unfinished run: give the command that began it once more, qtool quantize"
        " with --resume"
    )


def what_is_there(directory: Path) -> str:
    """What ``directory``, which has no safetensors that can be read, holds instead."""
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
