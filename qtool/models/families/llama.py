"""Llama 1/2/3, Mistral, Yi, Qwen1.5/2/2.5 (biases on q, k, v) and Qwen3 (norms on q and k).

One pre-norm residual block: attention, then a gated MLP.
"""

from dataclasses import replace

from qtool.models.family import Family
from qtool.models.parts import Attention, Fold, LinearGroup

Q, K, V, OUT = (f"self_attn.{x}_proj" for x in "qkvo")
GATE, UP, DOWN = (f"mlp.{x}_proj" for x in ("gate", "up", "down"))

LLAMA = Family(
    name="Llama",
    model_types=("llama", "mistral", "yi"),
    groups=(
        LinearGroup((Q, K, V), "input_layernorm", Fold.NORM),
        LinearGroup((OUT,), V, Fold.HEADS, writes_residual=True),
        LinearGroup((GATE, UP), "post_attention_layernorm", Fold.NORM),
        LinearGroup((DOWN,), UP, Fold.PRODUCT, writes_residual=True, gate=GATE),
    ),
    attention=Attention(q=Q, k=K, v=V, o=OUT),
    tensors={
        "input_layernorm.weight": "hidden",
        f"{Q}.weight": "q hidden",
        f"{K}.weight": "kv hidden",
        f"{V}.weight": "kv hidden",
        f"{OUT}.weight": "hidden q",
        "post_attention_layernorm.weight": "hidden",
        f"{GATE}.weight": "inter hidden",
        f"{UP}.weight": "inter hidden",
        f"{DOWN}.weight": "hidden inter",
    },
    biased_if={"attention_bias": (Q, K, V, OUT), "mlp_bias": (GATE, UP, DOWN)},
)

#: Qwen 1.5 too: its config.json says qwen2
QWEN2 = replace(LLAMA, name="Qwen2", model_types=("qwen2",), biased=(Q, K, V), biased_if={})

#: the norms on queries and keys of Qwen3 and Gemma 3
NORMS = {"self_attn.q_norm.weight": "dim", "self_attn.k_norm.weight": "dim"}

QWEN3 = replace(
    LLAMA,
    name="Qwen3",
    model_types=("qwen3",),
    attention=Attention(q=Q, k=K, v=V, o=OUT, q_norm="self_attn.q_norm", k_norm="self_attn.k_norm"),
    tensors={**LLAMA.tensors, **NORMS},
)
