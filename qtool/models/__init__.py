"""Model families: declared in ``families/``, else derived from transformers' model in ``derived/``.

A family of your own, here Llama's with biases on q, k and v::

    register_family(replace(LLAMA, name="Seed", model_types=("seed_oss",), biased=(Q, K, V)))
"""

from collections.abc import Mapping
from typing import Any

from qtool import plugins
from qtool.errors import QtoolError
from qtool.models.families.falcon import FALCON
from qtool.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from qtool.models.families.llama import LLAMA, QWEN2, QWEN3
from qtool.models.families.mixtral import MIXTRAL
from qtool.models.families.opt import OPT
from qtool.models.families.phi3 import PHI3
from qtool.models.families.qwen_moe import QWEN2_MOE, QWEN3_MOE
from qtool.models.family import Family
from qtool.models.family_checks import require_consistent
from qtool.models.parts import Attention, Experts, Fold, Heads, KVCache, LinearGroup

FAMILIES: list[Family] = [
    *(LLAMA, QWEN2, QWEN3, PHI3, GEMMA, GEMMA2, GEMMA3, OPT, FALCON),
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE),
]


def register_family(family: Family) -> None:
    """Add a family of your own, for the ``model_type`` values it names.

    Raises:
        QtoolError: no :class:`Family`, one that contradicts itself, or a ``model_type`` that
            another family covers.
    """
    if not isinstance(family, Family):
        raise QtoolError(f"register_family: {family!r} is no qtool.models.Family")
    require_consistent(family)
    for number, other in enumerate(FAMILIES):
        if plugins.same(other, family):
            FAMILIES[number] = family
            return
        if taken := set(other.model_types) & set(family.model_types):
            raise QtoolError(
                f"register_family: {other.name} covers model_type {min(taken)!r} already"
            )
    FAMILIES.append(family)


def _declared(model_type: str) -> Family | None:
    return next((family for family in FAMILIES if model_type in family.model_types), None)


def family_of(model: Mapping[str, Any] | Any) -> Family:
    """The family of a model: the declared one that covers it, else a derived one.

    Args:
        model: a config.json, or transformers' config object.

    Raises:
        QtoolError: what the model is, and why there is no family.
    """
    config = model if isinstance(model, Mapping) else model.to_dict()
    model_type = str(config["model_type"])
    if family := _declared(model_type):
        return family
    plugins.load()  # another package may declare it
    if family := _declared(model_type):
        return family
    from qtool.models.unsupported import why_unsupported  # asks transformers, which loads slowly

    reason = why_unsupported(model_type)
    if not reason:
        from qtool.models.derived import derive

        try:
            return derive(config)
        except QtoolError as error:
            reason = str(error)
    declared = ", ".join(t for family in FAMILIES for t in family.model_types)
    quantized = config.get("quantization_config")
    made_with = plugins.made_with(quantized) if isinstance(quantized, Mapping) else ""
    raise QtoolError(
        f"unsupported architecture {model_type!r}: {reason}{made_with}; declared are {declared}"
    )


__all__ = [
    "FAMILIES",
    "Attention",
    "Experts",
    "Family",
    "Fold",
    "Heads",
    "KVCache",
    "LinearGroup",
    "family_of",
    "register_family",
]
