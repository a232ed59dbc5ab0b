"""Phi-3 and Phi-4-mini: Llama with q, k and v in one linear and gate and up in another.

The fused linears are quantized as they are; transforms find q, k, v, gate and up as rows of them.
"""

from dataclasses import replace

from qtool.models.families.llama import DOWN, GATE, LLAMA, OUT, UP, K, Q, V
from qtool.models.parts import Attention, Fold, LinearGroup

QKV, GATE_UP = "self_attn.qkv_proj", "mlp.gate_up_proj"

PHI3 = replace(
    LLAMA,
    name="Phi-3",
    model_types=("phi3",),
    groups=(
        LinearGroup((QKV,), "input_layernorm", Fold.NORM),
        LLAMA.groups[1],
        LinearGroup((GATE_UP,), "post_attention_layernorm", Fold.NORM),
        LLAMA.groups[3],
    ),
    attention=Attention(q=Q, k=K, v=V, o=OUT, partial=True),
    fused={QKV: {Q: "q", K: "kv", V: "kv"}, GATE_UP: {GATE: "inter", UP: "inter"}},
    tensors={
        "input_layernorm.weight": "hidden",
        f"{QKV}.weight": "q+kv+kv hidden",
        f"{OUT}.weight": "hidden q",
        "post_attention_layernorm.weight": "hidden",
        f"{GATE_UP}.weight": "inter+inter hidden",
        f"{DOWN}.weight": "hidden inter",
    },
    biased_if={},
)
