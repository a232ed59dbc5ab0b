"""The plan of repacking a model that is already quantized: bytes, memory and time.

Sizes are exact. They follow from the headers of the model's files, its zero points and its group
indices; no codes are read.
"""

from math import prod
from pathlib import Path

from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.errors import QtoolError
from qtool.exchange.convert import shards_of
from qtool.exchange.import_ import Import
from qtool.io.integrity import INDEX
from qtool.io.source import SINGLE, Checkpoint
from qtool.models import family_of
from qtool.pipeline.job import Job
from qtool.pipeline.planning.estimate import CPU
from qtool.pipeline.planning.plan import Plan, kinds, plain_host_bytes
from qtool.pipeline.quantize import source_dtype
from qtool.recipes import Recipe

#: weights a second that two CPU cores repack, reading and writing included
WEIGHTS_PER_SECOND = 100e6


def plan_repack(directory: Path, recipe: Recipe, layout: str | None) -> Plan:
    """The plan of importing the quantized checkpoint in ``directory``.

    Args:
        recipe: the recipe by which a model in 16 bits would be quantized.
        layout: layout of every linear.

    Raises:
        QtoolError: as :func:`qtool.exchange.import_.import_checkpoint` does, or ``directory`` lacks
            the files that say how the model is packed.
    """
    if not any((directory / name).exists() for name in (INDEX, SINGLE)):
        raise QtoolError(
            f"{directory}: the model is quantized already, and how it is packed stands in its "
            "safetensors files, which are not there: pass the directory of a downloaded model"
        )
    source = Checkpoint(directory)
    work = Import(source, layout)
    dtype = source_dtype(source)
    job = Job(
        source.config,
        family_of(source.config),
        dtype,
        dtype,
        recipe,
        work.native,
        transforms=[],
        rounding=RoundToNearest(),
        source_notes=tuple(work.notes),
    )
    shards = [
        sum(tensor.nbytes for owner in owners for _, tensor in work.specs(owner))
        for owners in shards_of(work).values()
    ]
    return Plan(
        job=job,
        kinds=kinds(job),
        source_bytes=source.nbytes,
        shard_bytes=shards,
        host_bytes=plain_host_bytes(job),
        seconds=sum(map(prod, job.source_shapes().values())) / WEIGHTS_PER_SECOND,
        device=CPU.name,
        repacked=work.foreign.name,
    )
