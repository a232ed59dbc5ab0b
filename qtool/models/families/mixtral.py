"""Mixtral: Llama's attention, a router and a gated MLP for each expert.

The router reads the same norm as the experts and stays in 16 bits.
"""

from dataclasses import replace

from qtool.models.families.gated_mlp import (
    MLP_NORM,
    beside_mlp,
    expert_count,
    gated_mlp,
    gated_shapes,
)
from qtool.models.families.llama import LLAMA
from qtool.models.parts import Experts

W1, W3, W2 = (f"block_sparse_moe.experts.*.w{i}" for i in (1, 3, 2))
MIXTRAL = replace(
    LLAMA,
    name="Mixtral",
    model_types=("mixtral",),
    groups=(*LLAMA.groups[:2], *gated_mlp(W1, W3, W2)),
    tensors={
        **beside_mlp(LLAMA),
        "block_sparse_moe.gate.weight": "experts hidden",
        **gated_shapes(W1, W3, W2, "inter"),
    },
    biased_if={},
    readers={MLP_NORM: ("block_sparse_moe.gate",)},
    experts=Experts("block_sparse_moe", "mlp", gate="w1", up="w3", down="w2"),
    sizes={"experts": expert_count},
    defaults={"num_experts_per_tok": 2},
)
