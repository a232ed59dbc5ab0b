"""Which of transformers' classes a model is."""

from typing import Any


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
