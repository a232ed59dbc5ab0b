"""Names that published checkpoints have for what transformers' model calls otherwise.

transformers' own list of conversions says so; what it computes in another way than by joining
tensors is refused.
"""

import re
from typing import Any

from qtool.errors import QtoolError
from qtool.models.experts import Form, is_experts

#: names of an expert's linears where a checkpoint stacks them
LEAVES = "gate_proj", "up_proj", "down_proj"


def leaf_names(model: Any) -> dict[str, tuple[str | None, str, str, bool]]:
    """Names of gate, up and down of each stack of experts, as checkpoints have them.

    And whether checkpoints have the stack itself. transformers' own list of conversions says from
    which names a stack is made.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    stacks = {name: module for name, module in model.named_modules() if is_experts(module)}
    if not stacks:
        return {}
    converters = [c for c in get_model_conversion_mapping(model) if hasattr(c, "operations")]

    def leaves(name: str, part: str) -> list[str]:
        for converter in converters:
            made = any(_matches(t, f"{name}.{part}") for t in converter.target_patterns)
            names = [str(s).split(".") for s in converter.source_patterns]
            if made and all("*" in parts and parts[-1] == "weight" for parts in names):
                return [parts[-2] for parts in names]
        return []

    found: dict[str, tuple[str | None, str, str, bool]] = {}
    for name, stack in stacks.items():
        gate, up, down = LEAVES
        if Form.of(stack).gate and len(pair := leaves(name, "gate_up_proj")) == 2:
            gate, up = pair
        if not Form.of(stack).gate and (single := leaves(name, "up_proj")):
            up = single[0]
        single = leaves(name, "down_proj")
        down = single[0] if single else down
        found[name] = (gate if Form.of(stack).gate else None), up, down, not single
    return found


def disk_names(
    model: Any, numbers: set[int], blocks: str
) -> tuple[dict[str, str], dict[str, dict[str, int]]]:
    """Names on disk of tensors and stacks of experts that are called otherwise in ``model``.

    And of those that are several on disk, with their rows: they follow one another. Only of the
    blocks ``numbers``.

    Raises:
        QtoolError: a tensor is made of others in another way.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not get_model_conversion_mapping(model, add_legacy=False):
        return {}, {}
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not name.startswith(f"{blocks}.")
        or int(name[len(blocks) + 1 :].partition(".")[0]) in numbers
    }
    owners = {id(tensor): name for name, tensor in state.items()}
    found = {}
    for disk, tensor in revert_weight_conversion(model, dict(state)).items():
        if (own := owners.get(id(tensor))) is not None:
            found[own] = disk
    made = [name for name in state if name not in found]
    for name, module in model.named_modules():
        if is_experts(module) and any(n.startswith(f"{name}.") for n in made):
            stacks = {n: state[n] for n in made if n.startswith(f"{name}.")}
            made = [n for n in made if n not in stacks]
            for disk in revert_weight_conversion(model, stacks):
                if ".0." in disk and (base := disk.rpartition(".0.")[0]).rpartition(".")[2]:
                    found.setdefault(name, base)
            if name not in found:
                raise QtoolError(f"{name}: transformers computes its stacks when it loads them")
    joined = {}
    for name in made:
        parts = revert_weight_conversion(model, {name: state[name]})
        rows = sum(part.shape[0] for part in parts.values())
        same = {part.shape[1:] for part in parts.values()} == {state[name].shape[1:]}
        if not (same and rows == state[name].shape[0] and _follow(model, name)):
            raise QtoolError(f"{name}: transformers computes it from {min(parts)} when it loads it")
        joined[name] = {part: tensor.shape[0] for part, tensor in parts.items()}
    return {own: disk for own, disk in found.items() if own != disk}, joined


def _matches(target: str, name: str) -> bool:
    """Whether a conversion's ``target``, which may repeat groups of its source, makes ``name``."""
    return re.search(re.sub(r"\\\d", ".*", target), name) is not None


def _follow(model: Any, name: str) -> bool:
    """Whether transformers makes ``name`` of tensors that follow one another along dimension 0."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    for converter in get_model_conversion_mapping(model, add_legacy=False):
        if any(_matches(pattern, name) for pattern in converter.target_patterns):
            operations = getattr(converter, "operations", ())
            if operations:
                found = [(type(o).__name__, getattr(o, "dim", None)) for o in operations]
                return found == [("Concatenate", 0)]
    return False
