"""Llama 1/2/3, Mistral, Yi, Qwen2/2.5 (biases on q, k, v) and Qwen3 (norms on q and k).

One pre-norm residual block: attention, then a gated MLP.
"""

from dataclasses import replace

from qtool.models.family import Attention, Family, Fold, LinearGroup

LLAMA = Family(
    name="Llama",
    model_types=("llama", "mistral", "yi", "qwen2"),
    groups=(
        LinearGroup(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm", Fold.NORM),
        LinearGroup(("self_attn.o_proj",), "self_attn.v_proj", Fold.HEADS, writes_residual=True),
        LinearGroup(("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm", Fold.NORM),
        LinearGroup(("mlp.down_proj",), "mlp.up_proj", Fold.PRODUCT, writes_residual=True),
    ),
    attention=Attention(),
)

QWEN3 = replace(
    LLAMA,
    name="Qwen3",
    model_types=("qwen3",),
    attention=Attention(q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
)
