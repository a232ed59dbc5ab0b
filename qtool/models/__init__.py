"""What the supported model families look like: one short declarative file a family."""

from qtool.errors import QtoolError
from qtool.models.deepseek import DEEPSEEK
from qtool.models.falcon import FALCON
from qtool.models.family import Family
from qtool.models.gemma import GEMMA, GEMMA2, GEMMA3
from qtool.models.llama import LLAMA, QWEN2, QWEN3
from qtool.models.moe import MIXTRAL, QWEN2_MOE, QWEN3_MOE
from qtool.models.opt import OPT
from qtool.models.parts import Attention, Fold, Heads, LinearGroup, OncePerHead
from qtool.models.phi3 import PHI3

FAMILIES = (
    LLAMA,
    QWEN2,
    QWEN3,
    PHI3,
    GEMMA,
    GEMMA2,
    GEMMA3,
    OPT,
    FALCON,
    MIXTRAL,
    QWEN2_MOE,
    QWEN3_MOE,
)
#: families whose shapes are known, so that a run can be planned that nobody can make yet
PLANNED = (DEEPSEEK,)

#: architectures that were asked for and are not there, and what they would need
NEEDED = {
    **dict.fromkeys(DEEPSEEK.model_types, DEEPSEEK.unsupported),
    **dict.fromkeys(
        ("llama4", "llama4_text"),
        "experts that are stored transposed, a router that scales their inputs, and blocks without positions",
    ),
    **dict.fromkeys(
        ("gemma3", "mllama", "qwen2_vl", "qwen2_5_vl"),
        "the vision tower; the text model alone is what is supported",
    ),
    "gpt_oss": "experts with biases, their gate and up rows interleaved, and attention sinks",
}


def family_of(model_type: str, *, planning: bool = False) -> Family:
    """The family that covers ``model_type`` (config.json), one that can only be planned where that
    is all.

    Raises:
        QtoolError: naming the supported types.
    """
    for family in (*FAMILIES, *PLANNED) if planning else FAMILIES:
        if model_type in family.model_types:
            return family
    supported = ", ".join(t for family in FAMILIES for t in family.model_types)
    need = NEEDED.get(model_type, "one declarative file in qtool/models, see CONTRIBUTING.md")
    raise QtoolError(
        f"unsupported architecture {model_type!r}; supported: {supported} (it would need {need})"
    )


__all__ = [
    "FAMILIES",
    "Attention",
    "Family",
    "Fold",
    "Heads",
    "LinearGroup",
    "OncePerHead",
    "family_of",
]
