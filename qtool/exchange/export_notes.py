"""Notes on how a loader computes otherwise than qtool, besides differences of the weights."""

from collections.abc import Iterable, Mapping
from typing import Any

from qtool.exchange.convert import Json
from qtool.exchange.export_format import ExportFormat, Formats, native_activations
from qtool.exchange.exportable import SPLIT_EXPERTS
from qtool.exchange.gguf.tokenizer import caution as tokenizer_caution
from qtool.format import LinearFormat
from qtool.io.integrity import read_record, recorded_transforms
from qtool.io.source import Checkpoint
from qtool.models import Family, family_of
from qtool.models.architecture import dtype_name, named_dtype

NOT_THE_SOURCES = (
    "; one made of the source does not fit, since the residual stream is rotated: quantize with a "
    "recipe without that (rotate: {residual: false})"
)


def export_notes(
    target: ExportFormat, source: Checkpoint, formats: Formats, kv: str | None, keeps_kv: bool
) -> list[str]:
    """A sentence for each difference in the export of ``source`` to ``target`` besides weights.

    Args:
        formats: the format of each linear of the blocks; None if it stays in 16 bits.
        kv: the quantizer of the KV cache.
        keeps_kv: the scales of the KV cache go into the file.
    """
    config, family = source.config, family_of(source.config)
    quantized = dict.fromkeys(found for found in formats.values() if found)
    notes = []
    if family.derived:
        notes.append(f"no serving engine was tried with exports of {family.name} models")
    for scheme, ours in dict.fromkeys((f.scheme, native_activations(f)) for f in quantized):
        if ours != (theirs := target.activations(scheme)):
            notes.append(f"activations of {scheme}: {ours} here, {theirs} there")
    if kv is not None:
        notes.append(
            "KV cache: the calibrated kv8 maxima became one scale for all keys and one for all "
            "values of a block"
            if keeps_kv
            else f"KV cache: {kv} left out, the format has no place for it; set the cache's "
            "precision when serving"
        )
    if target.one_file and family.outside:
        notes.append(
            "towers and projectors left out: llama.cpp takes them from a file of their own"
            + (NOT_THE_SOURCES if family.entering and _rotated(source) else "")
        )
    if target.one_file and (otherwise := tokenizer_caution(source.directory)):
        notes.append(otherwise)
    notes += _dtype_notes(target, quantized, named_dtype(config))
    refused = not_loaded(target, config, formats)
    if target.read_by_transformers and (own := _converted(family, config, formats)):
        notes.append(
            f"transformers does not load this export: it makes {own} of other tensors, and drops "
            f"those that are in 16 bits when it loads {target.name}"
        )
    elif not refused and (told := target.loads_with(config, formats)):
        notes.append(told)
    return notes + refused


def _rotated(source: Checkpoint) -> bool:
    """Whether the recorded recipe rotated the residual stream."""
    step = recorded_transforms(read_record(source.directory)).get("rotate")
    return step is not None and step.get("residual", True)


def not_loaded(target: ExportFormat, config: Mapping[str, Any], formats: Formats) -> list[str]:
    """A sentence for each reason why transformers does not load linears of an export."""
    experts = family_of(config).experts
    if experts and experts.stacked:
        first = SPLIT_EXPERTS[config["model_type"]]
        return [
            "experts: published as one stack, here one by one: vLLM loads them from version "
            f"{first} on, transformers does not"
        ]
    return target.not_loaded(config, formats)


def _converted(family: Family, config: Json, formats: Formats) -> str:
    """A tensor that transformers converts from 16-bit weights of the export; empty if none."""
    plain = [part.name for parts in family.rows_on_disk.values() for part in parts]
    plain += [
        f"{published}.weight"
        for name, found in formats.items()
        if found is None
        for published in family.published_names(name)
    ]
    if not plain or not family.derived:
        return ""
    from qtool.models.derived import built  # imports transformers
    from qtool.models.derived.on_disk import loading

    loaded = loading(built(config))
    # transformers adds the names of packed weights to the patterns of such conversions
    taken = (own for own, pattern in map(loaded, plain) if (pattern or "").endswith(".weight"))
    return next(taken, "")


def _dtype_notes(target: ExportFormat, formats: Iterable[LinearFormat], dtype: str) -> list[str]:
    """Notes on other tensors than weights that are rounded, for a model of ``dtype``."""
    if target.dtype is not None:
        theirs = dtype_name(target.dtype)
        here = dtype or "a dtype that config.json does not name"
        note = f"embedding, norms, biases and head: {here} here, {theirs} there"
        return [] if dtype == theirs else [f"{note}, as the kernels want"]
    # an import keeps the dtype of the scales that it finds
    other = {f.scale_dtype for f in formats} - {dtype, "float32"}
    if dtype in ("float16", "bfloat16") and other:
        return [
            f"scales: {', '.join(other)} in the file, which loaders round to the model's {dtype}"
        ]
    return []
