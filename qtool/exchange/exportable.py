"""Decides from config.json whether a checkpoint can be exported, also before it is quantized."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from qtool.errors import QtoolError
from qtool.exchange import export_formats
from qtool.exchange.export_format import (
    ExportFormat,
    Formats,
    fused_shards_agree,
    scheme_and_group,
)
from qtool.format import CheckpointFormat, LinearFormat
from qtool.models import Family, family_of
from qtool.models.joined import joined_in_block
from qtool.units import group_size_text

#: model types whose published checkpoints hold a block's experts as one stack, and the first
#: version of vLLM whose loaders take packed experts one by one
SPLIT_EXPERTS = {
    **dict.fromkeys(("llama4", "llama4_text", "qwen3_vl_moe"), "0.26"),
    **dict.fromkeys(
        ("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"), "0.33"
    ),
}


def exported_formats(
    target: ExportFormat,
    checkpoint_format: CheckpointFormat,
    config: Mapping[str, Any],
    tensor_parallel: int = 1,
) -> dict[str, LinearFormat | None]:
    """The format of each linear of the blocks of ``config``, routers included.

    Raises:
        QtoolError: names what ``target`` cannot express, and the formats that take the whole model.
    """
    _require_exportable(checkpoint_format, config)
    try:
        formats = _formats(target, checkpoint_format, config, tensor_parallel)
    except QtoolError as error:
        if not (others := _that_take(checkpoint_format, config, tensor_parallel)):
            raise QtoolError(f"{error}; no format of a serving stack can") from error
        rotated = any(map(_rotated, others.values()))
        how = ", quantized with --for-export" if rotated else ""
        raise QtoolError(f"{error}; formats that can{how}: {', '.join(others)}") from error
    _require_unrotated(formats)
    return formats


def formats_that_take(checkpoint_format: CheckpointFormat, config: Mapping[str, Any]) -> list[str]:
    """Names of the formats that a checkpoint can be exported to.

    Raises:
        QtoolError: no format can hold such a model; the message says why.
    """
    _require_exportable(checkpoint_format, config)
    found = _that_take(checkpoint_format, config, 1)
    for formats in found.values():
        _require_unrotated(formats)
    return list(found)


def _that_take(
    checkpoint_format: CheckpointFormat, config: Mapping[str, Any], tensor_parallel: int
) -> dict[str, Formats]:
    """The :func:`_formats` of the model for each export format that takes it, by its name."""
    found: dict[str, Formats] = {}
    for name, target in export_formats.EXPORT_FORMATS.items():
        with suppress(QtoolError):
            found[name] = _formats(target, checkpoint_format, config, tensor_parallel)
    return found


def _require_exportable(checkpoint_format: CheckpointFormat, config: Mapping[str, Any]) -> None:
    """Refuse models that no format can hold."""
    family = family_of(config)
    if family.experts and family.experts.stacked and config["model_type"] not in SPLIT_EXPERTS:
        raise QtoolError(
            f"published {family.name} checkpoints hold a block's experts as one stack, and no "
            "loader of another format was seen to take them packed one by one"
        )
    if family.transposed:
        raise QtoolError(
            f"the linears of transformers' {family.name} are Conv1D, which are exported to no "
            "format"
        )
    settings = family.settings(config)
    if family.always_tied and not getattr(settings, "tie_word_embeddings", True):
        raise QtoolError(
            "the head is not the embedding any more, and serving stacks know no other head of "
            f"{family.name} models: quantize without rotating the residual stream and without "
            "norm-fusion"
        )
    if not any(map(checkpoint_format.of, family.all_linears(settings))):
        raise QtoolError("no linear of the checkpoint is quantized; there is nothing to export")


def _rotated(formats: Formats) -> str | None:
    """The first linear whose inputs are rotated at run time."""
    return next((name for name, found in formats.items() if found and found.rotated), None)


def _require_unrotated(formats: Formats) -> None:
    """Refuse linears whose inputs are rotated at run time."""
    if name := _rotated(formats):
        raise QtoolError(
            f"{name}: its inputs are rotated at run time (online-hadamard), which no loader of "
            "another format does: quantize with --for-export"
        )


def _formats(
    target: ExportFormat,
    checkpoint_format: CheckpointFormat,
    config: Mapping[str, Any],
    tensor_parallel: int,
) -> dict[str, LinearFormat | None]:
    """As :func:`exported_formats`, but it takes rotated inputs and its errors name no formats."""
    model = family_of(config)
    _require_known(target, model)
    target.require_model(config)
    if tensor_parallel > 1 and not target.tensor_parallel:
        raise QtoolError(
            f"{target.name}: its loader runs on one GPU; --tensor-parallel {tensor_parallel} is "
            "impossible"
        )
    namespace = model.settings(config)
    formats: dict[str, LinearFormat | None] = dict.fromkeys(model.other_linears)
    for block, family in enumerate(model.of_blocks(namespace)):
        shapes = family.block_shapes(namespace)
        ranks = family.tensor_parallel(namespace, tensor_parallel)
        prefix = f"{family.blocks}.{block}."
        for linear in family.linears():
            name = prefix + linear
            formats[name] = found = checkpoint_format.of(name)
            if found is None:
                continue
            if parts := model.rows_on_disk.get(f"{name}.weight"):
                raise QtoolError(
                    f"{name}: published {model.name} checkpoints hold {parts[0].name} instead; "
                    "loaders of another format convert only 16-bit weights between the two"
                )
            _require_scheme(target, name, found)
            if checkpoint_format.is_permuted(name) and not target.takes_gathered(found):
                raise QtoolError(
                    f"{name}: its input channels are reordered and its groups follow that order; "
                    f"{target.name} cannot gather a layer's input: quantize by a recipe without "
                    "the transform that reorders them, such as reorder or gather-outliers"
                )
            shape, cuts = shapes[f"{linear}.weight"], ranks[linear]
            _require_share(target, name, found, shape, cuts, tensor_parallel)
        routers = (router for readers in family.readers.values() for router in readers)
        beside = (*routers, *family.unquantized)
        formats |= dict.fromkeys(prefix + name for name in beside)
        for names in joined_in_block(family).values():
            fused_shards_agree(formats, [prefix + linear for linear in names])
        _require_experts(target, family, prefix, formats)
    _require_uniform(target, formats)
    return formats


def _require_known(target: ExportFormat, model: Family) -> None:
    """Refuse models that the loaders of ``target`` do not know."""
    if model.derived and not target.any_architecture:
        raise QtoolError(f"{target.name}: its loaders do not know {model.name} models")
    if model.experts and model.experts.stacked and not target.splits_experts:
        raise QtoolError(
            f"{target.name}: its loaders were not seen to take {model.name}'s experts, which are "
            "published as one stack, one by one"
        )


def _require_share(
    target: ExportFormat,
    name: str,
    found: LinearFormat,
    shape: tuple[int, ...],
    cuts: tuple[int, int],
    gpus: int,
) -> None:
    """Refuse a weight if ``target`` cannot hold one GPU's share; ``cuts``: parts of N and K."""
    (n, k), (rows, columns) = shape, cuts
    if n % rows or k % columns:
        raise QtoolError(f"{name}: a weight [{n}, {k}] cannot be split over {gpus} GPUs")
    where = name if gpus == 1 else f"{name} on one of {gpus} GPUs"
    target.require(where, found, n // rows, k // columns)


def _require_experts(target: ExportFormat, family: Family, prefix: str, formats: Formats) -> None:
    """Refuse experts that loaders cannot run, or whose formats differ within a block's stack."""
    names = [prefix + linear for group in family.groups if group.routed for linear in group.linears]
    if not names:
        return
    fused_shards_agree(formats, names)
    if (found := formats[names[0]]) is None:
        return
    if reason := target.refuses_experts(found):
        raise QtoolError(f"{names[0]} is an expert; {target.name} cannot hold it: {reason}")


def _require_scheme(target: ExportFormat, name: str, found: LinearFormat) -> None:
    """Refuse a scheme or group size; the error names what ``target`` takes."""
    sizes = target.expressible.get(found.scheme)
    if sizes and found.group_size in sizes:
        return
    accepted = ", ".join(target.expressible)
    if sizes:
        accepted = f"group size {', '.join(map(group_size_text, sizes))}"
    raise QtoolError(
        f"{name}: {target.name} cannot express {found.scheme} with group size "
        f"{group_size_text(found.group_size)}; it takes {accepted}"
    )


def _require_uniform(target: ExportFormat, formats: Formats) -> None:
    """Refuse linears of different formats if ``target`` has one setting for all linears."""
    kinds = {kind for found in formats.values() if (kind := scheme_and_group(found))}
    if target.uniform and len(kinds) > 1:
        sizes = (f"{scheme} {group_size_text(size)}" for scheme, size in sorted(kinds, key=str))
        raise QtoolError(
            f"{target.name} has one scheme and group size for the whole model, the checkpoint "
            f"mixes {', '.join(sizes)}"
        )
    plain = [name for name, found in formats.items() if found is None]
    if plain and not target.leaves_16_bit:
        raise QtoolError(
            f"{plain[0]} is in 16 bits: {target.name} has no ignore list, every linear must be "
            "quantized"
        )
