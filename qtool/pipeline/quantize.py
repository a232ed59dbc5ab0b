"""Quantizes a checkpoint block by block; a killed run can be resumed at any moment."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import qtool
from qtool import plugins
from qtool.calibration.timing import PhaseTimer, phase, recording
from qtool.distributed import ranks
from qtool.errors import Interrupted, NoSpace, QtoolError
from qtool.io.check_source import check_source, is_second_head, require_tied
from qtool.io.output import Output
from qtool.io.run_record import RunRecord
from qtool.io.source import Checkpoint
from qtool.models import family_of
from qtool.models.architecture import DTYPES, TEXT_CONFIGS, dtype_name, require_dtype
from qtool.models.auto import float_config
from qtool.models.skeleton import empty_model, stays_float32
from qtool.models.unsupported import config_class
from qtool.pipeline.job import Job
from qtool.pipeline.streaming.shards import Shards
from qtool.progress import Display, Progress
from qtool.recipes import Recipe
from qtool.runtime.dispatch import not_served
from qtool.runtime.packed_linears import PackedLinears
from qtool.units import bytes_text

if TYPE_CHECKING:  # it imports this module
    from qtool.pipeline.calibration_windows import Windows


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration tokens and where they come from.

    Attributes:
        tokens: batches ``[B, S]``.
        facts: where they come from; a run is resumed only where these are the same.
    """

    tokens: Sequence[Tensor] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    def for_run(self, output: Output) -> "Calibration":
        """The calibration itself: its tokens are drawn already."""
        return self


def quantize(
    source: Checkpoint,
    recipe: Recipe,
    out: Path,
    *,
    calibration: "Calibration | Windows | None" = None,
    device: str = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
    activations: str = "auto",
    dtype: str | torch.dtype | None = None,
    keep_unknown: bool = False,
) -> Path:
    """Quantize ``source`` by ``recipe`` into the directory ``out``.

    The time and memory of the run are written to ``OUT.run.json`` next to it.

    Args:
        calibration: token batches, or windows that are drawn when the run starts; needed if the
            recipe has a method that looks at activations.
        resume: continue an unfinished run of the same job.
        progress: called after each shard with (done, total, notes).
        activations: where activations are kept between blocks: ``device``, ``host``, ``disk``, or
            ``auto``.
        dtype: ``bfloat16``, ``float16`` or ``float32``, to which tensors that are not packed are
            cast; by default they are not cast.
        keep_unknown: copy tensors that the model's family does not know; by default they are
            refused.

    Raises:
        QtoolError: anything wrong with the input; nothing that looks whole is left behind.
    """
    job = job_of(source, recipe, dtype=dtype, keep_unknown=keep_unknown)
    require_apart(out, source.directory)
    if job.needs_data and calibration is None:
        raise QtoolError(
            f"recipe {recipe.scheme}/{recipe.variant} needs calibration data: pass --calib"
        )
    require_made(source.directory, job)
    require_tied(source, job)
    calibration = calibration or Calibration()
    specs, side_files = job.shards(), source.side_files()
    where = torch.device(device)
    output = Output(out, _identity(source, job, calibration, where), len(specs), resume=resume)
    if output.finished:
        ranks.log(f"{out} is complete; nothing is left to do")
        return out
    if output.continued:
        ranks.log(_resumed(output))
    with closing(output):
        record = RunRecord(out, output.identity, where, continued=output.continued)
        if record.other_threads and not job.is_plain:
            ranks.log(_other_threads(record))
        if isinstance(progress, Display):  # it shows the seconds that the record counts
            progress.restart(record.earlier_seconds)
        with recording(PhaseTimer(where)) as phases, _noting_refusal(output, record):
            drawn = _prepare(output, specs, side_files, job, calibration)
            record.write()
            tokens = drawn.tokens if job.needs_data else ()
            if said := _too_few(job, sum(ids.numel() for ids in tokens)):
                ranks.log(said)
            shards = Shards(source, job, specs, output, where, record, phases, progress)
            shards.make(tokens, activations)
            source.require_unchanged(output.identity["source model"])
        record.write()
        config = job.format.in_config(result_config(job))
        output.finish(config, _provenance(source, job, drawn), side_files)
    return out


def _prepare(
    output: Output,
    specs: Sequence[Mapping[str, Tensor]],
    side_files: Mapping[str, Path],
    job: Job,
    calibration: "Calibration | Windows",
) -> Calibration:
    """Check the disk and draw the calibration; a new run that cannot start leaves nothing."""
    try:
        if ranks.rank() == 0:
            copied = sum(path.stat().st_size for path in side_files.values())
            _require_space(output, output.missing_bytes(specs) + copied)
        if not job.needs_data:
            return Calibration(facts=calibration.facts)
        with phase("windows"):
            return calibration.for_run(output)
    except Interrupted:
        output.discard_empty()
        raise


def _too_few(job: Job, tokens: int) -> str:
    """What is said of a linear with more input channels than calibration ``tokens``; else empty.

    The Hessian of its inputs lacks rank: errors in directions that no token has cost nothing.
    """
    widths = [
        (shapes[name][1], job.full(block, name))
        for block in job.distinct_blocks
        for shapes in [job.linears(block)]
        for name in job.formats(block)
    ]
    channels, name = max(widths, default=(0, ""))
    if not job.rounding.needs_data or tokens >= channels:
        return ""
    return (
        f"{tokens} calibration tokens are fewer than the {channels} input channels of {name}: "
        f"{job.rounding.name} fits weights to these tokens alone, and may lose more than the "
        "recipe fast; take more or longer windows"
    )


def require_made(directory: Path, job: Job) -> None:
    """Refuse a config.json of a type that transformers knows, but of which it makes no model.

    Raises:
        QtoolError: what transformers says of the config.json in ``directory``.
    """
    if config_class(job.config["model_type"]):
        config = float_config(directory)
        if not job.family.derived:  # else its model was made when the family was derived
            empty_model(config)


@contextmanager
def _noting_refusal(output: Output, record: RunRecord) -> Iterator[None]:
    """Note an error of the work that would come again if the run were resumed.

    If nothing was written yet, no directory and no record are left.
    """
    try:
        yield
    except Interrupted:
        raise
    except QtoolError:
        output.note_refusal()
        output.discard_empty()
        if not output.partial.exists():
            record.path.unlink(missing_ok=True)
        raise


def job_of(
    source: Checkpoint,
    recipe: Recipe,
    *,
    dtype: str | torch.dtype | None = None,
    keep_unknown: bool = False,
) -> Job:
    """The job of quantizing ``source`` by ``recipe``, after a check of the source.

    The arguments are those of :func:`quantize`. Only headers are read.

    Raises:
        QtoolError: as :meth:`Job.of` and :func:`check_source` do.
    """
    cast = None if dtype is None else require_dtype("--dtype", dtype)
    job = Job.of(source.config, recipe, source_dtype(source), dtype=cast)
    shapes = check_source(source, job, keep_unknown=keep_unknown)
    unknown = {
        name: torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        for name, entry in source.entries.items()
        if name not in shapes and not is_second_head(name, job)
    }
    uncast = {*job.family.outside, *job.family.integers} if cast else {*shapes}
    if cast:
        model = empty_model(float_config(source.directory))
        uncast |= {name for name in shapes if stays_float32(model, name, cast)}
    dtypes = {name: source.entry(name).dtype for name in uncast}
    notes = tuple(source.notes)
    matrices = [name for name, t in unknown.items() if t.dim() > 1 and t.is_floating_point()]
    if matrices and job.transforms:
        notes += (
            f"{matrices[0]} and all else that no {job.family.name} model has is copied as it is; "
            "the recipe's transforms change embedding, norms and head, and it does not follow them",
        )
    others = {name: stored for name, stored in dtypes.items() if stored != job.dtype}
    found = replace(job.format, tower_names=tuple(source.tower_names.items()))
    return replace(job, format=found, other_dtypes=others, unknown=unknown, source_notes=notes)


def source_dtype(source: Checkpoint) -> torch.dtype:
    """The dtype of the stored weights: the embedding's, or the largest one's if none is found.

    Other dtypes than those of weights, which :func:`check_source` refuses, do not count; float32
    stands for them where there is nothing else.
    """
    entries = {name: e for name, e in source.entries.items() if e.dtype in DTYPES.values()}
    family = family_of(source.config)
    own = f"{family.embedding}.weight"
    largest = max(entries, key=lambda name: entries[name].nbytes, default="")
    names = (own, family.disk_name(own), own.partition(".")[2], largest)
    return next((entries[name].dtype for name in names if name in entries), torch.float32)


def require_apart(out: Path, source: Path) -> None:
    """Refuse an output directory that is the source's or holds it."""
    if source.resolve().is_relative_to(out.resolve()):
        raise QtoolError(
            f"--out {out}: the model that is read lies there; choose another directory"
        )


def _resumed(output: Output) -> str:
    """A sentence on where an unfinished run continues."""
    missing = [shard for shard in range(1, output.shards + 1) if shard not in output.records]
    done = f"{len(output.records)} of {output.shards} shards are whole"
    following = f"continues with shard {missing[0]}" if missing else "only its index is missing"
    return f"resuming {output.partial}: {done}, {following}"


def _other_threads(record: RunRecord) -> str:
    """A sentence on a run that continues with another number of threads."""
    before = " and ".join(map(str, record.other_threads))
    return (
        f"the run began with {before} threads (OMP_NUM_THREADS) and continues with "
        f"{record.attempt.threads}: sums are added in another order, so the bytes may be those of "
        "neither number"
    )


def result_config(job: Job) -> dict[str, Any]:
    """The source's config.json with what the job changes: the ties of the head, the dtype."""
    changes: dict[str, Any] = {"tie_word_embeddings": False} if job.unties else {}
    if job.dtype != job.source_dtype:
        changes["dtype"] = dtype_name(job.dtype)
    return _changed(job.config, changes)


def _changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``config`` with ``changes``, in the text model's part too; towers stay as they are.

    A dtype also replaces one under its old name.
    """
    old = "torch_dtype" if "dtype" in changes else None
    inner = {key: config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), dict)}
    text = {key: _changed(part, changes) for key, part in inner.items()}
    return {key: value for key, value in config.items() if key != old} | text | changes


def _identity(
    source: Checkpoint, job: Job, calibration: "Calibration | Windows", device: torch.device
) -> dict[str, Any]:
    """Facts that must be equal for a run to be resumed: all that determines its bytes."""
    return {
        "source model": source.fingerprint(),
        # a refusal names the first difference: first what a user gives, then what follows from it
        "recipe": {
            "scheme": job.format.scheme,
            "variant": job.recipe.variant,
            "kv": job.format.kv,
        }
        | _methods(job)
        | job.format.to_dict()
        | _stored(job),
        "calibration data": dict(calibration.facts),
        "device": device.type,
        "qtool version": qtool.__version__,
        "set of plugins": plugins.versions(),
    }


def _require_space(output: Output, need: int) -> None:
    free = shutil.disk_usage(output.partial).free
    if need > free:
        raise NoSpace(
            f"no space left: {output.partial} needs {bytes_text(need)}, {bytes_text(free)} are free"
        )


def versions() -> dict[str, str]:
    """The versions that a result depends on, by package."""
    from importlib.metadata import version

    own = {"qtool": qtool.__version__}
    return own | {name: version(name) for name in ("torch", "transformers")} | plugins.versions()


def _provenance(source: Checkpoint, job: Job, calibration: Calibration) -> dict[str, Any]:
    return {
        "format_version": job.format.version,
        "source": source.identity(),
        "scheme": job.format.scheme,
        **not_served(PackedLinears(source.config, job.format)),
        **({"rotated": list(job.format.rotated)} if job.format.rotated else {}),
        "recipe": _methods(job) | _about(job.recipe),
        **_stored(job),
        "calibration": dict(calibration.facts),
        "versions": versions(),
    }


def _stored(job: Job) -> dict[str, Any]:
    """Facts on tensors that are not packed: a cast dtype, unknown tensors."""
    facts: dict[str, Any] = {}
    if job.dtype != job.source_dtype:
        facts["dtype"] = {"source": dtype_name(job.source_dtype), "stored": dtype_name(job.dtype)}
    if job.unknown:
        facts["unknown_tensors"] = list(job.unknown)
    return facts


def _about(recipe: Recipe) -> dict[str, Any]:
    """What a user's recipe says about itself, and how it was changed to fit the model."""
    facts: dict[str, Any] = {}
    if recipe.about and not recipe.built_in:
        facts["about"] = recipe.about
    if recipe.adaptations:
        facts["adaptations"] = list(recipe.adaptations)
    return facts


def _methods(job: Job) -> dict[str, Any]:
    recipe = job.recipe
    methods = [{step.name: dict(step.options)} for step in (*recipe.transforms, recipe.rounding)]
    facts: dict[str, Any] = {"variant": recipe.variant, "methods": methods}
    if job.needs_data and job.family.experts:
        facts["min_expert_tokens"] = recipe.min_expert_tokens
    return facts


def fingerprint(tokens: Sequence[Tensor]) -> str:
    """sha256 of token ids and the sizes of their batches, for provenance."""
    digest = hashlib.sha256(json.dumps([list(t.shape) for t in tokens]).encode())
    for ids in tokens:
        digest.update(ids.numpy().tobytes())
    return digest.hexdigest()
