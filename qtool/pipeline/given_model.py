"""The model that a caller gives: its config, its directory, and checks of one in memory."""

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from qtool.errors import QtoolError, expand_home, in_one_line
from qtool.format import native_format
from qtool.io.model_directory import directory_of
from qtool.io.source import read_config
from qtool.models.architecture import dtype_name

if TYPE_CHECKING:  # it takes seconds to import
    from transformers import PreTrainedModel

#: a directory, a hub id or ``demo``; a path is a directory
Name: TypeAlias = str | PathLike[str]


def config_of(model: "Name | PreTrainedModel") -> dict[str, Any]:
    """The config.json of a directory, a hub id, ``demo`` or a file, or of a model in memory.

    Raises:
        QtoolError: there is none, or it cannot be read.
    """
    if isinstance(model, str | PathLike):
        return read_config(config_directory(model))
    require_model(model)
    return model.config.to_dict() | {"dtype": dtype_name(model.dtype)}


def config_directory(model: Name) -> Path:
    """The directory of the config.json of a directory, a hub id, ``demo`` or that file itself.

    Raises:
        QtoolError: as :func:`qtool.io.model_directory.directory_of`.
    """
    if Path(model).name == "config.json":
        return expand_home(model).parent
    return directory_of(model, weights=False)


def native_directory(model: Name) -> Path:
    """The directory of a model that must be a native checkpoint.

    Raises:
        QtoolError: it is not quantized, or not by qtool.
    """
    directory = directory_of(model)
    config = read_config(directory)
    if "quantization_config" not in config:
        raise QtoolError(
            f"{model}: the model is not quantized; make a quantized one first:"
            f" qtool quantize {model} --scheme w4a8-lqq"
        )
    native_format(config)
    return directory


def require_model(model: object) -> None:
    """Check that a ``model`` which is neither a path nor a name is a model of transformers.

    Raises:
        QtoolError: it is not a model of transformers.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise QtoolError(
            f"model {in_one_line(repr(model))}: a directory, a hub id, demo or a transformers model"
            " is expected"
        )


def require_tokenizer(tokenizer: object) -> None:
    """Check that the tokenizer of a model in memory is one of transformers, not a name.

    Raises:
        QtoolError: it is not a tokenizer of transformers.
    """
    from transformers import PreTrainedTokenizerBase

    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise QtoolError(
            f"tokenizer {in_one_line(repr(tokenizer))}: a transformers tokenizer is expected, as"
            " qtool.load_tokenizer gives it"
        )
