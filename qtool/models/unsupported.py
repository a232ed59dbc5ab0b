"""Explains why a model type has no family here, by transformers' own lists of types."""

from qtool.models.families.deepseek import DEEPSEEK

#: what a family would need that nobody declared yet
NEEDED = {
    **dict.fromkeys(DEEPSEEK.model_types, DEEPSEEK.unsupported),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        "experts that are stored transposed, a router that scales their inputs, and blocks without "
        "positions",
    ),
    "gpt_oss": "experts with biases, their gate and up rows interleaved, and attention sinks",
}
#: blocks without attention
STATE_SPACE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
#: blocks with attention and others without
HYBRID = (
    *("jamba", "bamba", "zamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "kimi_linear"),
    *("lfm2", "lfm2_moe", "lfm3", "olmo_hybrid", "minimax", "bailing_hybrid", "recurrent_gemma"),
)


def why_unsupported(model_type: str) -> str:
    """The kind of model that ``model_type`` is, and the reason it cannot be quantized."""
    from transformers import __version__
    from transformers.models.auto import configuration_auto, modeling_auto

    def is_listed(*tasks: str) -> bool:
        lists = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in tasks)
        return any(model_type in names for names in lists)

    if model_type in NEEDED:
        return f"it would need {NEEDED[model_type]}"
    if model_type in STATE_SPACE:
        return "a state-space model: its blocks have no attention, and qtool's families do"
    if model_type in HYBRID:
        return (
            "a hybrid: some of its blocks mix tokens by a recurrence or a convolution instead of "
            "attention, and qtool's families have attention in each"
        )
    if is_listed("MULTIMODAL_LM", "IMAGE_TEXT_TO_TEXT"):
        return (
            "a multimodal wrapper; qtool quantizes text models alone: if the model_type of its "
            "text_config is one of those below, save that model by itself (docs/limits.md has the "
            "lines)"
        )
    if is_listed("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        return "an encoder-decoder; qtool quantizes decoder-only models"
    if is_listed("MASKED_LM"):
        return "an encoder; qtool quantizes decoder-only models"
    if is_listed("CAUSAL_LM"):
        return (
            "a decoder that nobody declared yet: if its blocks are attention and linears, one "
            "declarative file or qtool.models.register_family adds it, see CONTRIBUTING.md"
        )
    if is_listed("IMAGE_CLASSIFICATION", "ZERO_SHOT_IMAGE_CLASSIFICATION"):
        return "a vision model; qtool quantizes decoder-only language models"
    if model_type in configuration_auto.CONFIG_MAPPING_NAMES:
        return "no causal language model, which is what qtool quantizes"
    return f"transformers {__version__} does not know it either; is it newer, or misspelt?"
