"""Which of transformers' classes a model is."""

from pathlib import Path
from typing import Any

from qtool.errors import QtoolError
from qtool.models import family_of


def float_config(directory: Path) -> Any:
    """transformers' config of a directory, as of the model before it was quantized."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


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

    So it is for a model that has no family.
    """
    try:
        return model.get_submodule(family_of(model.config).text)
    except QtoolError:
        return model
