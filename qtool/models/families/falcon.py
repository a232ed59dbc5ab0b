"""Falcon: LayerNorm, fused q, k and v, and an MLP of two linears beside the attention.

GELU stands between the two linears. The 7B has one norm for both sides and one kv head; the new
decoder architecture (40B, 180B) has a norm for each side and groups of query heads with a kv head,
whose key and value go to the KV cache once for each of them; the RW models are sequential. In all
of them the fused rows are ordered by kv head: its query heads, its key, its value.
"""

from dataclasses import replace
from typing import Any

from qtool.models.family import Family
from qtool.models.parts import Attention, Fold, KVCache, LinearGroup

QKV, DENSE = "self_attention.query_key_value", "self_attention.dense"
Q, K, V = (f"self_attention.{x}" for x in "qkv")
WIDE, NARROW = "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"
LINEARS = {
    f"{QKV}.weight": "q+kv+kv hidden",
    f"{DENSE}.weight": "hidden q",
    f"{WIDE}.weight": "inter hidden",
    f"{NARROW}.weight": "hidden inter",
}
WRITERS = (
    LinearGroup((DENSE,), V, Fold.HEADS, writes_residual=True),
    LinearGroup((NARROW,), WIDE, Fold.ACTIVATION, writes_residual=True),
)


def _norms(*names: str) -> dict[str, str]:
    return {f"{name}.{part}": "hidden" for name in names for part in ("weight", "bias")}


def _choose(config: Any, block: int) -> Family:
    new = getattr(config, "new_decoder_architecture", False)
    if new and (getattr(config, "num_ln_in_parallel_attn", None) or 2) == 2:
        return TWO_NORMS
    return ONE_NORM if new or config.parallel_attn else SEQUENTIAL


FALCON = Family(
    name="Falcon",
    model_types=("falcon",),
    groups=(LinearGroup((QKV, WIDE), "input_layernorm", Fold.NORM), *WRITERS),
    attention=Attention(q=Q, k=K, v=V, o=DENSE),
    kv_cache=KVCache("self_attention", "layer_past"),
    tensors={**_norms("input_layernorm"), **LINEARS},
    biased_if={"bias": (QKV, DENSE, WIDE, NARROW)},
    fused={QKV: {Q: "q", K: "kv", V: "kv"}},
    fused_by_head=True,
    layer_norm=True,
    embedding="transformer.word_embeddings",
    blocks="transformer.h",
    final_norm="transformer.ln_f",
    sizes={
        "inter": lambda config: getattr(config, "ffn_hidden_size", None) or 4 * config.hidden_size
    },
    defaults={"tie_word_embeddings": True, "multi_query": True, "parallel_attn": True},
    choose=_choose,
    returns=2,
)

ONE_NORM = replace(FALCON, choose=None)
TWO_NORMS = replace(
    ONE_NORM,
    groups=(
        LinearGroup((QKV,), "ln_attn", Fold.NORM),
        LinearGroup((WIDE,), "ln_mlp", Fold.NORM),
        *WRITERS,
    ),
    tensors={**_norms("ln_attn", "ln_mlp"), **LINEARS},
)
SEQUENTIAL = replace(
    ONE_NORM,
    groups=(
        LinearGroup((QKV,), "input_layernorm", Fold.NORM),
        WRITERS[0],
        LinearGroup((WIDE,), "post_attention_layernorm", Fold.NORM),
        WRITERS[1],
    ),
    tensors={**_norms("input_layernorm", "post_attention_layernorm"), **LINEARS},
)
