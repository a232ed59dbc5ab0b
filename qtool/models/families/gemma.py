"""Gemma 1, 2 and 3 (text): norms multiply by 1 + weight, the head is the embedding.

Embeddings are multiplied by sqrt(hidden). Gemma 2 and 3 also norm what attention and MLP write to
the residual stream. Gemma 3 has norms on q and k. Scaling, soft-capping and sliding windows are in
transformers' own code and concern no weight.
"""

from dataclasses import replace

from qtool.models.families.llama import GATE, LLAMA, NORMS, OUT, QWEN3, UP, K, Q, V
from qtool.models.parts import Fold, LinearGroup

GEMMA = replace(
    LLAMA,
    name="Gemma",
    model_types=("gemma",),
    norm_offset=1.0,
    biased_if={"attention_bias": (Q, K, V, OUT)},
    defaults={"tie_word_embeddings": True},
    always_tied=True,
)

GEMMA2 = replace(
    GEMMA,
    name="Gemma 2",
    model_types=("gemma2",),
    groups=(
        *GEMMA.groups[:2],
        LinearGroup((GATE, UP), "pre_feedforward_layernorm", Fold.NORM),
        GEMMA.groups[3],
    ),
    post_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
    tensors={
        **GEMMA.tensors,
        "pre_feedforward_layernorm.weight": "hidden",
        "post_feedforward_layernorm.weight": "hidden",
    },
)

GEMMA3 = replace(
    GEMMA2,
    name="Gemma 3",
    model_types=("gemma3_text",),
    attention=QWEN3.attention,
    tensors={**GEMMA2.tensors, **NORMS},
)
