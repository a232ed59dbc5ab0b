"""DeepSeek V2 and V3, to be planned: low-rank attention (MLA), then an MLP or experts.

Shapes only. V2-Lite has one full query projection instead of two of low rank; the first blocks are
dense.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from qtool.models.families.gated_mlp import MLP_NORM, gated_mlp, gated_shapes
from qtool.models.families.llama import DOWN, GATE, OUT, UP, Q
from qtool.models.families.qwen_moe import EXPERT
from qtool.models.family import Family
from qtool.models.parts import Attention, Experts, Fold, LinearGroup

NEED = (
    "attention over low-rank keys and values (MLA): norms between linears, and a KV cache of "
    "latents"
)
Q_A, Q_B, KV_A, KV_B = (
    f"self_attn.{x}" for x in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")
)
Q_NORM, KV_NORM = "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"
SHARED = (
    "mlp.shared_experts.gate_proj",
    "mlp.shared_experts.up_proj",
    "mlp.shared_experts.down_proj",
)


class LatentAttention(Family):
    """A family whose queries and keys have other channels a head than its values."""

    def settings(self, config: Mapping[str, Any]) -> SimpleNamespace:
        """config.json as an object; ``head_dim`` is the mean of both, as cost estimates want."""
        settings = super().settings(config)
        wide = getattr(settings, "qk_nope_head_dim", 0) + getattr(settings, "qk_rope_head_dim", 0)
        settings.head_dim = (wide + getattr(settings, "v_head_dim", 0)) // 2
        return settings


@cache
def _block(low_rank_queries: bool, sparse: bool, corrected: bool) -> Family:
    queries = (Q_A,) if low_rank_queries else (Q,)
    groups = [LinearGroup((*queries, KV_A), "input_layernorm", Fold.NORM)]
    tensors = {"input_layernorm.weight": "hidden"}
    if low_rank_queries:
        groups.append(LinearGroup((Q_B,), Q_NORM, Fold.NORM))
        tensors |= {
            f"{Q_A}.weight": "ranks hidden",
            f"{Q_NORM}.weight": "ranks",
            f"{Q_B}.weight": "queries ranks",
        }
    else:
        tensors[f"{Q}.weight"] = "queries hidden"
    groups += [
        LinearGroup((KV_B,), KV_NORM, Fold.NORM),
        LinearGroup((OUT,), KV_B, Fold.NONE, writes_residual=True),
    ]
    tensors |= {
        f"{KV_A}.weight": "latent+rope hidden",
        f"{KV_NORM}.weight": "latent",
        f"{KV_B}.weight": "keys latent",
        f"{OUT}.weight": "hidden values",
        f"{MLP_NORM}.weight": "hidden",
    }
    if not sparse:
        return replace(
            BASE,
            groups=(*groups, *gated_mlp(GATE, UP, DOWN)),
            tensors=tensors | gated_shapes(GATE, UP, DOWN, "inter"),
        )
    return replace(
        BASE,
        groups=(*groups, *gated_mlp(*EXPERT), *gated_mlp(*SHARED)),
        tensors={
            **tensors,
            "mlp.gate.weight": "experts hidden",
            **({"mlp.gate.e_score_correction_bias": "experts"} if corrected else {}),
            **gated_shapes(*EXPERT, "expert"),
            **gated_shapes(*SHARED, "shared"),
        },
        experts=Experts(),
    )


def _choose(config: Any, block: int) -> Family:
    step = getattr(config, "moe_layer_freq", None) or 1
    sparse = block >= (getattr(config, "first_k_dense_replace", None) or 0) and block % step == 0
    return _block(
        bool(getattr(config, "q_lora_rank", None)), sparse, config.model_type == "deepseek_v3"
    )


BASE = LatentAttention(
    name="DeepSeek",
    model_types=("deepseek_v2", "deepseek_v3"),
    groups=(),
    attention=Attention(q=Q_B, k=KV_B, v=KV_B, o=OUT),
    tensors={},
    sizes={
        "ranks": lambda config: config.q_lora_rank or 0,
        "latent": lambda config: config.kv_lora_rank,
        "rope": lambda config: config.qk_rope_head_dim,
        "queries": lambda config: (
            config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
        ),
        "keys": lambda config: (
            config.num_attention_heads * (config.qk_nope_head_dim + config.v_head_dim)
        ),
        "values": lambda config: config.num_attention_heads * config.v_head_dim,
        "experts": lambda config: config.n_routed_experts,
        "expert": lambda config: config.moe_intermediate_size,
        "shared": lambda config: config.moe_intermediate_size * (config.n_shared_experts or 1),
    },
    refuses=dict.fromkeys(
        ("rotate", "smooth-attention", "value-basis", "kv"),
        "not worked out for low-rank keys and values",
    ),
    unsupported=NEED,
)
DEEPSEEK = replace(BASE, choose=_choose)
