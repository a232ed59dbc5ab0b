"""The gated MLP of Llama, declared for any names, such as those of an expert."""

from typing import Any

from qtool.models.family import Family
from qtool.models.parts import Fold, LinearGroup

MLP_NORM = "post_attention_layernorm"


def beside_mlp(dense: Family) -> dict[str, str]:
    """The tensors of a block of ``dense`` besides its MLP, and their shapes in words."""
    return {name: shape for name, shape in dense.tensors.items() if not name.startswith("mlp.")}


def gated_mlp(gate: str, up: str, down: str) -> tuple[LinearGroup, LinearGroup]:
    """The two groups of a gated MLP behind the MLP norm."""
    return (
        LinearGroup((gate, up), MLP_NORM, Fold.NORM),
        LinearGroup((down,), up, Fold.PRODUCT, writes_residual=True, gate=gate),
    )


def gated_shapes(gate: str, up: str, down: str, width: str) -> dict[str, str]:
    """The tensors of a gated MLP whose inner size is called ``width``."""
    return {
        f"{gate}.weight": f"{width} hidden",
        f"{up}.weight": f"{width} hidden",
        f"{down}.weight": f"hidden {width}",
    }


def expert_count(config: Any) -> int:
    """The number of experts, under either of the names that config.json has for it."""
    return int(getattr(config, "num_local_experts", None) or config.num_experts)
