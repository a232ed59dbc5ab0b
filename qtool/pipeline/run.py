"""Carries out a run by names: finds the model, fits the recipe, cuts the text, runs the job."""

from collections.abc import Collection, Mapping
from dataclasses import fields
from os import PathLike, fspath
from os.path import abspath
from pathlib import Path
from typing import Any

from qtool.data.mix import count_windows
from qtool.distributed import ranks
from qtool.errors import require_path
from qtool.exchange import export_formats
from qtool.exchange.export_format import ExportFormat
from qtool.exchange.exportable import exported_formats
from qtool.exchange.import_ import Import, import_checkpoint
from qtool.format import CheckpointFormat
from qtool.io.adapter import Adapter
from qtool.io.model_directory import DEMO, directory_of, provenance
from qtool.io.output import require_new
from qtool.io.source import Checkpoint
from qtool.models.torch_defaults import torch_defaults
from qtool.pipeline.options import QuantizeOptions
from qtool.pipeline.quantize import job_of, quantize, require_apart, result_config
from qtool.pipeline.summary import Quantized, summarize
from qtool.progress import Progress
from qtool.recipes import Recipe
from qtool.runtime.dispatch import serving_notes
from qtool.runtime.packed_linears import PackedLinears

#: options that only matter to a recipe that uses calibration data
CALIBRATING = ("windows", "samples", "seqlen", "seed", "data_dir", "activations")


@torch_defaults()
def run(
    model: str | PathLike[str],
    recipe: Recipe,
    out: Path,
    options: QuantizeOptions,
    *,
    text: Any = None,
    device: str = "cpu",
    export_format: str | None = None,
    progress: Progress | None = None,
) -> Quantized:
    """Quantize ``model`` by ``recipe`` into the directory ``out``.

    A model that is quantized already is imported code for code, if ``recipe`` is w4a16/fast and the
    options change nothing but its layout (:meth:`QuantizeOptions.repacks`).

    Args:
        text: the calibration text, as :func:`qtool.pipeline.calibration_windows.Windows` takes
            it; by default ``wikitext2``, and for the demo its own.
        export_format: a format for a later export: what it cannot express is refused before any
            work, and so is a directory ``OUT-FORMAT`` that exists.

    Raises:
        QtoolError: anything wrong with the input.
    """
    target = None if export_format is None else export_formats.get(export_format)
    directory = directory_of(model)
    require_apart(out, directory)
    adapter = None if options.adapter is None else Adapter(fspath(options.adapter))
    source = Checkpoint(directory, adapter)
    if options.repacks(source.config, recipe, text):
        if target is not None:
            native = Import(source, options.layout).native
            _require_exportable(target, native, source.config, out, options)
        _log_unused(
            options, (*CALIBRATING, "keep_unknown"), "a quantized model is repacked as it is"
        )
        return repack(model, out, options.layout, progress=progress)
    job = job_of(source, recipe, dtype=options.dtype, keep_unknown=options.keep_unknown)
    for note in (*job.notes, *serving_notes(PackedLinears(source.config, job.format))):
        ranks.log(note)
    if not job.needs_data:
        count_windows(text, options.samples)  # refuses what no recipe could use
        reason = f"recipe {recipe.scheme}/{recipe.variant} looks at no activations"
        _log_unused(options, CALIBRATING, reason, text)
    if target is not None:
        _require_exportable(target, job.format, result_config(job), out, options)
    calibration = None
    if job.needs_data:
        # the module imports text generation, which takes seconds
        from qtool.pipeline.calibration_windows import Windows

        given = default_text(directory) if text is None else text
        calibration = Windows(source, job, given, options, device)
    quantize(
        source,
        recipe,
        out,
        calibration=calibration,
        device=device,
        resume=options.resume,
        progress=progress,
        activations=options.activations,
        dtype=options.dtype,
        keep_unknown=options.keep_unknown,
    )
    ranks.barrier()  # rank 0 gives the finished directory its name
    return summarize(out, source, fspath(model))


def repack(
    model: str | PathLike[str],
    out: Path,
    layout: str | None,
    *,
    progress: Progress | None,
) -> Quantized:
    """Import the quantized ``model`` (a directory or a hub id) into ``out`` in ``layout``."""
    directory = directory_of(model)
    require_apart(out, directory)
    source = Checkpoint(directory)
    imported = import_checkpoint(source, out, layout, progress=progress)
    for note in imported.notes:
        ranks.log(note)
    return summarize(imported.directory, source, fspath(model))


def default_out(model: str | PathLike[str], scheme: str) -> Path:
    """``MODEL-SCHEME`` next to a local model; in the working directory for the demo and hub models.

    MODEL is the last part of a hub model's id, also if its directory in the hub's cache is given.
    """
    local = require_path("model", model)
    if model == "demo" or not local.is_dir():
        return out_beside(Path(fspath(model).split("/")[-1]), scheme)
    named = Path(abspath(local))  # a link is named, not what it leads to
    facts = provenance(named)
    return out_beside(Path(facts["directory"]) if "hub id" in facts else named, scheme)


def out_beside(directory: Path, made: str) -> Path:
    """``DIRECTORY-MADE``: where what is made of ``directory`` by a scheme or a format is put."""
    return directory.parent / f"{directory.name}-{made}"


def default_text(directory: Path) -> str:
    """The calibration text of a model if the user gives none."""
    return "demo" if directory == DEMO else "wikitext2"


def _require_exportable(
    target: ExportFormat,
    native: CheckpointFormat,
    config: Mapping[str, Any],
    out: Path,
    options: QuantizeOptions,
) -> None:
    """Refuse a result ``out`` that ``target`` cannot express, and an ``OUT-FORMAT`` that exists."""
    exported_formats(target, native, config)
    if not options.resume:
        require_new(out_beside(out, target.name))


def _log_unused(
    options: QuantizeOptions, names: Collection[str], reason: str, text: Any = None
) -> None:
    """Log which of the options ``names`` were given but are not used; the same for ``text``."""
    named = f"--calib {text}" if isinstance(text, str | Path) else "the calibration data"
    given = [named] if text is not None else []
    for field in fields(options):
        value = getattr(options, field.name)
        if field.name in names and value != field.default:
            option = f"--{field.name.replace('_', '-')}"
            given.append(option if value is True else f"{option} {value}")
    if given:
        ranks.log(f"{reason}: {', '.join(given)} not used")
