"""A family as text, like a declaration by hand, and as plain data."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from qtool.models.family import Family
from qtool.models.parts import Fold, LinearGroup

#: fields that no declaration shows: functions, and what only derived families have, most of which
#: :func:`as_text` lists below it
NOT_SHOWN = frozenset(
    {
        *("unquantized", "outside", "choose", "sizes", "defaults", "derived", "refuses"),
        *("fixed_stream", "streamed_only", "disk_names", "rows_on_disk", "ignored"),
        *("transposed", "integers", "read_of_text", "other_linears", "entering"),
    }
)


def kinds_of_blocks(family: Family, config: Mapping[str, Any]) -> dict[Family, list[int]]:
    """The families of the blocks, experts as ``*``, and the numbers of the blocks of each."""
    settings = family.settings(config)
    found: dict[Family, list[int]] = {}
    for block in range(int(settings.num_hidden_layers)):
        own = family.choose(settings, block) if family.choose else family
        found.setdefault(own, []).append(block)
    return found


def as_dict(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """The family at the sizes of a config.json as plain data, for ``--json``."""
    return {
        "name": family.name,
        "model_types": list(family.model_types),
        "derived": family.derived,
        "embedding": family.embedding,
        "text": family.text,
        "positions": family.positions,
        "blocks": family.blocks,
        "final_norm": family.final_norm,
        "head": family.head,
        "passes": dict(family.passes),
        "kinds_of_blocks": [
            _block(own, numbers) for own, numbers in kinds_of_blocks(family, config).items()
        ],
        "outside": {name: list(shape) for name, shape in family.outside.items()},
        "entering": list(family.entering),
        "disk_names": dict(family.disk_names),
        "rows_on_disk": {
            name: [vars(part) for part in parts] for name, parts in family.rows_on_disk.items()
        },
        "transposed": sorted(family.transposed),
        "left_out": left_out(family),
    }


def _block(family: Family, numbers: list[int]) -> dict[str, Any]:
    return {
        "blocks": numbers,
        "groups": [
            {
                "linears": list(group.linears),
                "source": group.source,
                "fold": group.fold.value,
                "gate": group.gate,
                "writes_residual": group.writes_residual,
                "multiplier": group.multiplier,
                "ordered": group.ordered,
            }
            for group in family.groups
        ],
        "attention": vars(family.attention) if family.attention else None,
        "kv_cache": vars(family.kv_cache) if family.kv_cache else None,
        "experts": vars(family.experts) if family.experts else None,
        "tensors": dict(family.tensors),
        "biased": list(family.biased),
        "fused": {linear: dict(parts) for linear, parts in family.fused.items()},
        "readers": {norm: list(names) for norm, names in family.readers.items()},
        "post_norms": list(family.post_norms),
        "norm_offset": family.norm_offset,
        "layer_norm": family.layer_norm,
        "kept": dict(family.unquantized),
    }


def left_out(family: Family) -> dict[str, str]:
    """The methods that a model of the family cannot have, and why."""
    reasons = dict(family.refuses)
    if family.why_fixed:
        reasons["rotate the residual stream"] = family.why_fixed
    if family.streamed_only:
        reasons["methods that look at activations"] = family.streamed_only
    return reasons


def as_text(family: Family, config: Mapping[str, Any]) -> str:
    """The family as a declaration, with linears in 16 bits, methods left out, and the reasons."""
    kinds = kinds_of_blocks(family, config)
    where = "derived from transformers' model" if family.derived else "declared"
    lines = [f"# {family.name}, {where}, at the sizes of this config.json"]
    for own, numbers in kinds.items():
        if len(kinds) > 1:
            lines.append(f"# blocks {', '.join(map(str, numbers))}")
        lines.append(_declaration(own))
        lines += [f"# in 16 bits: {name}: {reason}" for name, reason in own.unquantized.items()]
        for group in own.groups:
            if group.fold is Fold.NONE:
                lines.append(f"# nothing folds into the input of {', '.join(group.linears)}")
    lines += [f"# left out: {what}: {why}" for what, why in left_out(family).items()]
    if family.entering:
        lines.append(f"# enter the residual stream too: {', '.join(family.entering)}")
    if still := [name for name in family.outside if name not in family.entering]:
        lines.append(f"# as they are: {', '.join(still)}")
    return "\n".join(lines)


def _declaration(family: Family) -> str:
    parts = []
    for field in fields(family):
        value = getattr(family, field.name)
        default = field.default
        if default is MISSING and field.default_factory is not MISSING:
            default = field.default_factory()
        if field.name not in NOT_SHOWN and (value != default or field.name in ("name", "groups")):
            parts.append(f"    {field.name}={_value(value)},")
    return "Family(\n" + "\n".join(parts) + "\n)"


def _value(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], LinearGroup):
        return "(\n" + "".join(f"        {_group(group)},\n" for group in value) + "    )"
    if isinstance(value, Mapping) and value:
        items = "".join(f"        {name!r}: {part!r},\n" for name, part in value.items())
        return "{\n" + items + "    }"
    return repr(value)


def _group(group: LinearGroup) -> str:
    parts = [repr(group.linears), repr(group.source), f"Fold.{group.fold.name}"]
    if group.writes_residual:
        parts.append("writes_residual=True")
    if group.multiplier != 1:
        parts.append(f"multiplier={group.multiplier!r}")
    if group.gate:
        parts.append(f"gate={group.gate!r}")
    if not group.ordered:
        parts.append("ordered=False")
    return f"LinearGroup({', '.join(parts)})"
