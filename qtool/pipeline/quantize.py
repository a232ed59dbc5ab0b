"""The main job: read a checkpoint block by block, quantize, write; resumable at any moment."""

import hashlib
import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import qtool
from qtool.distributed import ranks
from qtool.errors import QtoolError
from qtool.io.output import Output
from qtool.io.source import Checkpoint
from qtool.io.source_names import adopt
from qtool.pipeline.job import Job
from qtool.pipeline.run_record import RunRecord
from qtool.pipeline.streaming.embedding_and_head import require_tied
from qtool.pipeline.streaming.shards import Progress, Shards
from qtool.recipes import Recipe


@dataclass
class Calibration:
    """Token batches ``[B, S]`` to calibrate on and where they came from (provenance)."""

    tokens: Sequence[Tensor] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)


def quantize(
    source: Checkpoint,
    recipe: Recipe,
    out: Path,
    *,
    calibration: Calibration | None = None,
    device: str = "cpu",
    resume: bool = False,
    progress: Progress | None = None,
    activations: str = "auto",
) -> Path:
    """Quantize ``source`` by ``recipe`` into the directory ``out``.

    Beside it goes ``OUT.run.json``, the time and memory the run took.

    Args:
        calibration: token batches; needed if the recipe has a method that looks at activations.
        resume: continue an unfinished run of the same job.
        progress: called after each shard with (done, total, notes).
        activations: where they are kept between blocks: ``device``, ``host``, ``disk``, or
            ``auto``.

    Raises:
        QtoolError: anything wrong with the input; nothing that looks whole is left behind.
    """
    job = Job.of(source.config, recipe, source_dtype(source))
    check_source(source, job)
    calibration = calibration or Calibration()
    if job.needs_data and not calibration.tokens:
        raise QtoolError(
            f"recipe {recipe.scheme}/{recipe.variant} needs calibration data: pass --calib"
        )
    specs = job.shards()
    where = torch.device(
        "cpu" if job.is_plain else device
    )  # weights streamed one by one never leave it
    output = Output(out, _identity(source, job, calibration, where), len(specs), resume=resume)
    if output.finished:
        return out
    with closing(output):
        if ranks.rank() == 0:
            _require_space(output, specs)
        record = RunRecord(out, output.identity, where, continued=output.continued)
        Shards(source, job, output, where, record, progress).make(calibration.tokens, activations)
        config = job.config | {"quantization_config": job.format.to_dict()}
        if job.unties:
            config["tie_word_embeddings"] = False
        record.write()
        output.finish(config, _provenance(source, job, calibration), source.side_files())
    return out


def source_dtype(source: Checkpoint) -> torch.dtype:
    """The dtype of the stored weights: the embedding's."""
    dtype = next(iter(source.entries.values())).dtype
    embeddings = [e.dtype for name, e in source.entries.items() if "embed" in name]
    return embeddings[0] if embeddings else dtype


def check_source(
    source: Checkpoint, job: Job, packed: Collection[str] = ()
) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model is there with the declared shape and a float dtype, and no unknown
    one.

    Args:
        packed: linears that are quantized there, whose own tensors the caller checks.

    Returns:
        The shapes of what was found, by name.

    Raises:
        QtoolError: naming the first tensor that is not as it must be.
    """
    adopt(source, job)
    expected = {
        name: shape
        for name, shape in job.source_shapes().items()
        if name.removesuffix(".weight") not in packed
    }
    for name, shape in expected.items():
        entry = source.entry(name)
        if entry.shape != shape:
            raise QtoolError(
                f"{name}: shape {list(entry.shape)} found, {list(shape)} expected from config.json"
            )
        if not entry.dtype.is_floating_point or entry.dtype.itemsize < 2:
            raise QtoolError(
                f"{name}: dtype {entry.dtype} found; a float16, bfloat16 or float32 weight is expected"
            )
    for name in source.entries:
        ignored = name.endswith("rotary_emb.inv_freq") or (
            job.tied and name == f"{job.family.head}.weight"
        )
        if name not in expected and not ignored and name.rpartition(".")[0] not in packed:
            raise QtoolError(
                f"{name}: not a tensor of a {job.family.name} model; refusing to lose it"
            )
    require_tied(source, job)
    return expected


def _identity(
    source: Checkpoint, job: Job, calibration: Calibration, device: torch.device
) -> dict[str, Any]:
    """What must be the same for a run to be resumed: all that the bytes of its result follow from."""
    return {
        "source model": source.fingerprint(),
        "recipe": job.format.to_dict() | _methods(job.recipe),
        "calibration data": dict(calibration.facts),
        "device": device.type,
        "qtool version": qtool.__version__,
    }


def _require_space(output: Output, specs: Sequence[Mapping[str, Tensor]]) -> None:
    missing = [spec for shard, spec in enumerate(specs, 1) if shard not in output.records]
    need = sum(t.numel() * t.dtype.itemsize for spec in missing for t in spec.values())
    free = shutil.disk_usage(output.partial).free
    if need > free:
        raise QtoolError(
            f"no space left: {output.partial} needs {need / 1e9:.2f} GB, {free / 1e9:.2f} GB are free"
        )


def _provenance(source: Checkpoint, job: Job, calibration: Calibration) -> dict[str, Any]:
    from importlib.metadata import version

    return {
        "format_version": job.format.version,
        "source": {"directory": source.directory.name, "fingerprint": source.fingerprint()},
        "scheme": job.format.scheme,
        "recipe": _methods(job.recipe),
        "calibration": dict(calibration.facts),
        "versions": {"qtool": qtool.__version__}
        | {name: version(name) for name in ("torch", "transformers")},
    }


def _methods(recipe: Recipe) -> dict[str, Any]:
    steps = (*recipe.transforms, recipe.rounding)
    left_out = {"left_out": list(recipe.left_out)} if recipe.left_out else {}
    return {
        "variant": recipe.variant,
        "methods": [{step.name: dict(step.options)} for step in steps],
    } | left_out


def fingerprint(tokens: Sequence[Tensor]) -> str:
    """sha256 of token ids, for provenance."""
    digest = hashlib.sha256(json.dumps([list(t.shape) for t in tokens]).encode())
    for ids in tokens:
        digest.update(ids.numpy().tobytes())
    return digest.hexdigest()
