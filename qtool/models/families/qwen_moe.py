"""Qwen2-MoE and Qwen3-MoE: Qwen's attention, a router and a gated MLP for each expert.

Router and shared-expert gate read the same norm as the experts and stay in 16 bits. Qwen2-MoE has
one more expert that sees every token. Some blocks may be dense: config.json names them.
"""

from dataclasses import replace
from typing import Any

from qtool.errors import QtoolError, require_count
from qtool.models.families.gated_mlp import (
    MLP_NORM,
    beside_mlp,
    expert_count,
    gated_mlp,
    gated_shapes,
)
from qtool.models.families.llama import LLAMA, QWEN3, K, Q, V
from qtool.models.parts import Experts

EXPERT = "mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj"
SHARED = "mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj", "mlp.shared_expert.down_proj"


def _is_dense(config: Any, block: int) -> bool:
    step = getattr(config, "decoder_sparse_step", None) or 1
    dense = getattr(config, "mlp_only_layers", None) or []
    if not isinstance(dense, list | tuple) or not all(isinstance(n, int) for n in dense):
        raise QtoolError(f"config.json: mlp_only_layers is {dense!r}; a list of blocks is expected")
    require_count("config.json: decoder_sparse_step", step)
    return block in dense or bool((block + 1) % step)


QWEN3_DENSE = replace(QWEN3, name="Qwen3-MoE")
QWEN3_SPARSE = replace(
    QWEN3_DENSE,
    groups=(*LLAMA.groups[:2], *gated_mlp(*EXPERT)),
    tensors={
        **beside_mlp(QWEN3),
        "mlp.gate.weight": "experts hidden",
        **gated_shapes(*EXPERT, "expert"),
    },
    readers={MLP_NORM: ("mlp.gate",)},
    experts=Experts(),
    sizes={"experts": expert_count, "expert": lambda config: config.moe_intermediate_size},
)
QWEN3_MOE = replace(
    QWEN3_SPARSE,
    model_types=("qwen3_moe",),
    defaults={"num_experts_per_tok": 8},
    choose=lambda config, block: QWEN3_DENSE if _is_dense(config, block) else QWEN3_SPARSE,
)

QWEN2_DENSE = replace(LLAMA, name="Qwen2-MoE", biased_if={"qkv_bias": (Q, K, V)})
QWEN2_SPARSE = replace(
    QWEN2_DENSE,
    groups=(*LLAMA.groups[:2], *gated_mlp(*EXPERT), *gated_mlp(*SHARED)),
    tensors={
        **beside_mlp(LLAMA),
        "mlp.gate.weight": "experts hidden",
        **gated_shapes(*EXPERT, "expert"),
        **gated_shapes(*SHARED, "shared"),
        "mlp.shared_expert_gate.weight": "1 hidden",
    },
    readers={MLP_NORM: ("mlp.gate", "mlp.shared_expert_gate")},
    experts=Experts(),
    sizes={**QWEN3_SPARSE.sizes, "shared": lambda config: config.shared_expert_intermediate_size},
)
QWEN2_MOE = replace(
    QWEN2_SPARSE,
    model_types=("qwen2_moe",),
    defaults={"qkv_bias": True, "num_experts_per_tok": 4},
    choose=lambda config, block: QWEN2_DENSE if _is_dense(config, block) else QWEN2_SPARSE,
)
