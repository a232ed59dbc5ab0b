"""Which of transformers' classes a model is."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from qtool import plugins
from qtool.errors import QtoolError, in_one_line
from qtool.models import family_of

#: what fails where transformers refuses a config.json, for :func:`running`
CANNOT_MAKE = "transformers cannot make the model of config.json"


def float_config(directory: Path) -> Any:
    """:func:`config_of` the model before it was quantized."""
    config = config_of(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


def config_of(directory: Path) -> Any:
    """transformers' config of a directory.

    Raises:
        QtoolError: transformers cannot read it, and what it says, or ``architectures`` is of
            another ``model_type``.
    """
    import transformers

    plugins.load()  # one may hold the model's class
    with running(fails=CANNOT_MAKE):
        config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    _require_architectures(config)
    return config


def _require_architectures(config: Any) -> None:
    """Refuse classes of another model: transformers goes by ``model_type``, vLLM by these."""
    from transformers.models.auto import modeling_auto

    names, found = config.architectures or [], dict[str, str]()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise QtoolError(
            f"config.json: its architectures is {names!r}; a list of names is expected"
        )
    for table in ("CAUSAL_LM", "MULTIMODAL_LM"):
        for kind, name in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").items():
            if name in names:
                found[kind] = name
    if found and config.model_type not in found:
        kind, name = next(iter(found.items()))
        raise QtoolError(
            f"config.json: its architectures has {name}, the class of model_type {kind!r}, and its "
            f"model_type is {config.model_type!r}: one of the two is wrong"
        )


@contextmanager
def running(
    advice: str = "",
    *,
    fails: str = "transformers cannot run the model of config.json",
    kind: type[QtoolError] = QtoolError,
) -> Iterator[None]:
    """While open, turn what others' code raises (a model's, a plugin's) into one sentence.

    Args:
        advice: what the sentence ends with.
        fails: what it begins with.
        kind: the class of the error.

    Raises:
        kind: ``FAILS (CLASS: MESSAGE)ADVICE``; a QtoolError and torch's error for a GPU without
            free memory are left as they are.
    """
    try:
        yield
    except (QtoolError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise kind(f"{fails} ({type(error).__name__}: {in_one_line(error)}){advice}") from error


def auto_class(config: Any) -> Any:
    """transformers' auto class for the whole model of ``config``, a transformers config.

    A multimodal wrapper's causal class may be its text model alone, which would leave its towers
    behind: its config.json says by ``architectures`` which of the two it is.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    kind = config.model_type
    multimodal = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(kind)
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if multimodal is None or (causal and causal in (config.architectures or [multimodal])):
        return transformers.AutoModelForCausalLM
    return transformers.AutoModelForMultimodalLM


def text_model(model: Any) -> Any:
    """The part of a transformers model that takes text alone: mostly ``model`` itself.

    If the model has no family, it is ``model`` too.
    """
    try:
        return model.get_submodule(family_of(model.config).text)
    except QtoolError:
        return model
