"""llama.cpp's models: the settings that each has fixed in its code, whatever a config.json says.

llama.cpp knows a model by its architecture's name and a few numbers; the rest is in its code. A
setting that its code does not read must therefore have the value that the code computes with.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError, in_one_line
from qtool.models import Heads, family_of
from qtool.strict_json import number

#: kinds of RoPE that qtool writes for all architectures, and the frequency base of sliding windows
ROPE_TYPES, LOCAL_BASE = ("default", "linear"), 10000.0


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's architectures.

    Args:
        activation: the activation function of its MLP.
        fixed: settings that it does not read, and the values that it computes with.
        interleaved_rope: its RoPE rotates neighbouring channels of queries and keys, where
            transformers rotates channels i and i + D/2, so the rows of both are interleaved.
        rope_types: the kinds of RoPE that qtool writes for it.
        heads_span_hidden: its heads together are as wide as the hidden state.
        window_period: the last of every so many blocks attends to all tokens, and the others attend
            to a sliding window; with 0 all blocks attend to all tokens.
        blocks_of_27b: the number of blocks by which it knows the 27B model, whose scores it divides
            by the root of H / heads; those of other models it divides by the root of the head size.
    """

    name: str
    activation: str = "silu"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    interleaved_rope: bool = False
    rope_types: tuple[str, ...] = ROPE_TYPES
    heads_span_hidden: bool = False
    window_period: int = 0
    blocks_of_27b: int = 0


ALL_SPARSE: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
NO_BIAS: dict[str, Any] = {"attention_bias": False}
CAUSAL: dict[str, Any] = NO_BIAS | {"use_bidirectional_attention": False}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}
GELU = "gelu_pytorch_tanh"
LLAMA = Architecture("llama", interleaved_rope=True, rope_types=(*ROPE_TYPES, "llama3"))
#: the last of every so many blocks of SmolLM3 has no RoPE
NO_ROPE = 4
#: architectures by model type; each has a place for every tensor of such a model
ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "mixtral"), LLAMA),
    "qwen2": Architecture("qwen2", heads_span_hidden=True),
    "qwen3": Architecture("qwen3", fixed=NO_BIAS),
    "qwen2_moe": Architecture(
        "qwen2moe",
        fixed=ALL_SPARSE | UNTIED | {"norm_topk_prob": False},
        heads_span_hidden=True,
    ),
    "qwen3_moe": Architecture("qwen3moe", fixed=ALL_SPARSE | NO_BIAS | {"norm_topk_prob": True}),
    "gemma": Architecture("gemma", GELU, CAUSAL),
    "gemma2": Architecture("gemma2", GELU, CAUSAL, window_period=2, blocks_of_27b=46),
    "gemma3_text": Architecture(
        "gemma3",
        GELU,
        CAUSAL | {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        window_period=6,
        blocks_of_27b=62,
    ),
    "phi3": Architecture("phi3", heads_span_hidden=True),
    "olmo2": Architecture("olmo2", fixed=NO_BIAS | UNTIED, heads_span_hidden=True),
    "granite": Architecture("granite", interleaved_rope=True, rope_types=LLAMA.rope_types),
    "smollm3": Architecture("smollm3", fixed=NO_BIAS | {"mlp_bias": False}, interleaved_rope=True),
    "glm4": Architecture("glm4"),
    "seed_oss": Architecture("seed_oss", fixed={"attention_out_bias": False, "mlp_bias": False}),
    "ernie4_5": Architecture("ernie4_5", fixed={"use_bias": False}),
}


def settings_of(config: Mapping[str, Any]) -> Any:
    """transformers' config object of the text model of a config.json.

    Raises:
        QtoolError: transformers does not take the config.json.
    """
    import transformers

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    own = json.loads(json.dumps(plain, default=str), object_hook=number)
    try:
        return transformers.AutoConfig.for_model(**own).get_text_config(decoder=True)
    except Exception as error:  # transformers' checks raise exceptions of several types
        raise QtoolError(
            f"gguf: transformers does not take this config.json ({in_one_line(error)})"
        ) from error


def require(config: Mapping[str, Any]) -> None:
    """Refuse a model that llama.cpp would compute in another way.

    Raises:
        QtoolError: names the setting that llama.cpp does not know.
    """
    settings = settings_of(config)
    if (kind := settings.model_type) not in ARCHITECTURES:
        raise QtoolError(
            f"gguf: written for {', '.join(ARCHITECTURES)}; {kind} models need llama.cpp's own "
            "converter"
        )
    own = ARCHITECTURES[kind]
    _require_fixed(own, settings)
    _require_windows(own, settings)
    _require_ropes(own, settings)
    _require_scores(own, settings)


def _require_fixed(own: Architecture, settings: Any) -> None:
    """Refuse another value of a setting that llama.cpp's code fixes, and heads of another size."""
    newer = getattr(settings, "hidden_activation", None)  # None in the first Gemma's
    activation = "hidden_activation" if newer else "hidden_act"
    for key, value in {**own.fixed, activation: own.activation}.items():
        found = getattr(settings, key, value)
        if found != value and (found or value):  # None, False and [] mean the same
            raise QtoolError(f"gguf: {key} is {found!r}; llama.cpp's {own.name} has {value!r}")
    heads = Heads.of(settings)
    if own.heads_span_hidden and heads.query * heads.dim != settings.hidden_size:
        raise QtoolError(
            f"gguf: {heads.query} heads of {heads.dim}; llama.cpp's {own.name} has heads of "
            f"{settings.hidden_size // heads.query}"
        )


def _require_windows(own: Architecture, settings: Any) -> None:
    """Refuse sliding windows in other blocks than the architecture's."""
    if not own.window_period:
        if window := getattr(settings, "sliding_window", None):
            raise QtoolError(
                f"gguf: llama.cpp's {own.name} has no sliding window, this model has one of "
                f"{window}"
            )
        return
    kinds = [
        "sliding_attention" if (block + 1) % own.window_period else "full_attention"
        for block in range(settings.num_hidden_layers)
    ]
    if settings.layer_types != kinds:
        raise QtoolError(
            f"gguf: llama.cpp's {own.name} attends to all tokens in the last of every "
            f"{own.window_period} blocks, and to a window in the others; layer_types says otherwise"
        )


def _require_ropes(own: Architecture, settings: Any) -> None:
    """Refuse RoPE of another kind, or in other blocks, than the architecture's."""
    blocks = range(1, settings.num_hidden_layers + 1)
    if getattr(settings, "no_rope_layers", None) not in (None, [n % NO_ROPE > 0 for n in blocks]):
        raise QtoolError(f"gguf: llama.cpp has RoPE in all but the last of every {NO_ROPE} blocks")
    ropes = settings.rope_parameters
    if "sliding_attention" in ropes:
        local, ropes = ropes["sliding_attention"], ropes["full_attention"]
        if (local["rope_type"], local["rope_theta"]) != ("default", LOCAL_BASE):
            raise QtoolError(
                f"gguf: llama.cpp's {own.name} has RoPE of base {LOCAL_BASE} in windows"
            )
    if (found := ropes["rope_type"]) not in own.rope_types:
        raise QtoolError(
            f"gguf: RoPE is of type {found!r}; for llama.cpp's {own.name} qtool writes "
            f"{', '.join(own.rope_types)}"
        )


def _require_scores(own: Architecture, settings: Any) -> None:
    """Refuse another factor of the scores, or no soft caps, where the architecture has windows."""
    if not own.window_period:
        return
    heads = Heads.of(settings)
    is_27b = settings.num_hidden_layers == own.blocks_of_27b
    scale = settings.hidden_size // heads.query if is_27b else heads.dim
    if settings.query_pre_attn_scalar != scale:
        raise QtoolError(
            f"gguf: query_pre_attn_scalar is {settings.query_pre_attn_scalar}; llama.cpp's "
            f"{own.name} divides by the root of {scale}"
        )
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if key not in own.fixed and getattr(settings, key) is None:
            raise QtoolError(f"gguf: {key} is None; llama.cpp's {own.name} has a number")


def write_hyper_parameters(package: Any, writer: Any, settings: Any) -> None:
    """Give ``writer`` the numbers that llama.cpp reads."""
    heads, family = Heads.of(settings), family_of(settings)
    experts, attention = family.sizes.get("experts"), family.attention
    assert attention is not None
    rope = settings.rope_parameters
    rope = rope.get("full_attention", rope)
    writer.add_block_count(settings.num_hidden_layers)
    writer.add_context_length(settings.max_position_embeddings)
    writer.add_embedding_length(settings.hidden_size)
    writer.add_feed_forward_length(settings.intermediate_size)
    writer.add_head_count(heads.query)
    writer.add_head_count_kv(heads.kv)
    writer.add_key_length(heads.dim)
    writer.add_value_length(heads.dim)
    writer.add_rope_dimension_count(attention.rotary_dim(settings))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(settings.rms_norm_eps)
    writer.add_vocab_size(settings.vocab_size)
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if experts:
        writer.add_expert_count(experts(settings))
        writer.add_expert_used_count(settings.num_experts_per_tok)
    for key, add in (
        ("moe_intermediate_size", writer.add_expert_feed_forward_length),
        ("shared_expert_intermediate_size", writer.add_expert_shared_feed_forward_length),
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("attention_multiplier", writer.add_attention_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("logits_scaling", writer.add_logit_scale),
    ):
        if (value := getattr(settings, key, None)) is not None:
            add(value)


def rope_factors(settings: Any) -> Tensor | None:
    """The divisors of Llama 3's RoPE frequencies in llama.cpp, float32 ``[D / 2]``."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = settings.rope_parameters
    if rope.get("rope_type") != "llama3":
        return None
    dim = Heads.of(settings).dim
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, dim, 2).float() / dim)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](settings, None)
    return plain / scaled


def as_stored(name: str, tensor: Tensor, settings: Any) -> Tensor:
    """``tensor``, whose name in our model is ``name``, as llama.cpp stores it.

    Vectors and routers are float32, a norm's weight is the factor itself, and rows of Llama's q and
    k are in pairs.
    """
    module = name.rpartition(".")[0]
    linear = module.rpartition(".")[2]
    if linear.endswith("norm") and (offset := family_of(settings).norm_offset):
        return tensor.float() + offset
    if linear in ("gate", "shared_expert_gate"):
        return tensor.float().squeeze(0)
    tensor = tensor.float() if tensor.dim() == 1 else tensor
    if ARCHITECTURES[settings.model_type].interleaved_rope and linear in ("q_proj", "k_proj"):
        heads = Heads.of(settings)
        count = heads.query if linear == "q_proj" else heads.kv
        return tensor.unflatten(0, (count, 2, heads.dim // 2)).transpose(1, 2).flatten(0, 2)
    return tensor
