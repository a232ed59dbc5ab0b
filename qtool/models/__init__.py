"""What the supported model families look like: one short declarative file a family."""

from qtool.errors import QtoolError
from qtool.models.family import Attention, Family, Fold, Heads, LinearGroup
from qtool.models.gemma import GEMMA, GEMMA2, GEMMA3
from qtool.models.llama import LLAMA, QWEN2, QWEN3
from qtool.models.moe import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from qtool.models.opt import OPT
from qtool.models.phi3 import PHI3

FAMILIES = (LLAMA, QWEN2, QWEN3, PHI3, GEMMA, GEMMA2, GEMMA3, OPT, MIXTRAL, QWEN2_MOE, QWEN3_MOE)


def family_of(model_type: str) -> Family:
    """The family that covers ``model_type`` (config.json).

    Raises:
        QtoolError: naming the supported types.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    supported = ", ".join(t for family in FAMILIES for t in family.model_types)
    raise QtoolError(
        f"unsupported architecture {model_type!r}; supported: {supported} "
        "(a new one needs one declarative file in qtool/models, see CONTRIBUTING.md)"
    )


__all__ = ["FAMILIES", "Attention", "Family", "Fold", "Heads", "LinearGroup", "family_of"]
