"""Saves a model in memory as a checkpoint directory, for as long as a run reads it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from qtool.errors import QtoolError
from qtool.io import hub
from qtool.runtime.load import load_tokenizer


def require_model(model: object) -> None:
    """Check that a ``model`` which is neither a path nor a name is a model of transformers.

    Raises:
        QtoolError: it is not a model of transformers.
    """
    if not isinstance(model, PreTrainedModel):
        raise QtoolError(
            f"model {model!r}: a directory, a hub id, demo or a transformers model is expected"
        )


def require_tokenizer(tokenizer: object) -> None:
    """Check that the tokenizer of a model in memory is one of transformers, not a name.

    Raises:
        QtoolError: it is not a tokenizer of transformers.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise QtoolError(
            f"tokenizer {tokenizer!r}: a transformers tokenizer is expected, as"
            " qtool.load_tokenizer gives it"
        )


@contextmanager
def saved(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> Iterator[Path]:
    """A temporary directory with ``model`` in safetensors, and its tokenizer if there is one.

    Args:
        tokenizer: by default the tokenizer of the directory or hub id from which the model was
            loaded, if it is on this machine.

    Raises:
        QtoolError: ``model`` is not a model of transformers, is quantized or has no weights, or
            ``tokenizer`` is not a tokenizer.
    """
    require_model(model)
    if tokenizer is not None:
        require_tokenizer(tokenizer)
    if getattr(model, "hf_quantizer", None) is not None:
        raise QtoolError("the model in memory is quantized already: pass the original one")
    if model.device.type == "meta" and not hasattr(model, "hf_device_map"):  # nor offloaded
        raise QtoolError("the model in memory has no weights: it is on the device meta")
    with TemporaryDirectory(prefix="qtool-") as directory:
        source = Path(directory) / "source"
        model.save_pretrained(source)
        tokenizer = tokenizer or _own_tokenizer(model)
        if tokenizer is not None:
            tokenizer.save_pretrained(source)
        yield source


def _own_tokenizer(model: PreTrainedModel) -> PreTrainedTokenizerBase | None:
    if not (name := model.name_or_path):
        return None
    try:
        with hub.offline():
            return load_tokenizer(Path(name) if Path(name).is_dir() else name)
    except QtoolError:
        return None
