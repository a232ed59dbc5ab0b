"""transformers' own lists of model types, and why a type has no family here."""

from typing import Any

#: decoders that transformers lists among encoders too
DECODERS = ("modernbert-decoder",)
ENCODER_DECODER = "an encoder-decoder; qtool quantizes decoder-only models"


def is_built_in(model_type: str) -> bool:
    """Whether ``model_type`` is transformers' own, not that of a class that a plugin registers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def config_class(model_type: str) -> Any:
    """transformers' class of configs of ``model_type``, or that of a plugin; None if unknown."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING as known  # loads slowly

    return known[model_type] if model_type in known else None  # noqa: SIM401  (get fails)


def why_unsupported(model_type: str) -> str:
    """The kind of model that ``model_type`` is, and the reason it cannot be quantized.

    Empty for a decoder, whose family can be derived.
    """
    from transformers import __version__
    from transformers.models.auto import modeling_auto

    def is_listed(*tasks: str) -> bool:
        lists = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in tasks)
        return any(model_type in names for names in lists)

    if is_listed("MASKED_LM") and not is_listed("MULTIMODAL_LM") and model_type not in DECODERS:
        return "an encoder; qtool quantizes decoder-only models"
    known = config_class(model_type)
    if known and known.is_encoder_decoder:
        return ENCODER_DECODER
    if is_listed("MULTIMODAL_LM"):
        return ""
    if is_listed("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        return ENCODER_DECODER
    if is_listed("CAUSAL_LM") or (known and known in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING):
        return ""
    if is_listed("IMAGE_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION"):
        return "a vision model; qtool quantizes decoder-only language models"
    if known:
        return "no causal language model, which is what qtool quantizes"
    return (
        f"transformers {__version__} does not know it either; is it newer, misspelt, or of a plugin"
        " that is not installed here?"
    )
