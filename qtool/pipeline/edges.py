"""The two ends of a model - embedding; final norm and head - rewritten by the transforms, a few rows at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from qtool.checkpoint.source import Checkpoint
from qtool.errors import QtoolError
from qtool.pipeline.job import Job

#: of a matrix that are in memory at a time
PIECE_BYTES = 64 << 20


def embedding(source: Checkpoint, job: Job) -> Iterator[tuple[str, Tensor]]:
    """``(name, rows)`` of the embedding of the result, in pieces."""
    name = f"{job.family.embedding}.weight"
    for rows in _rows(source, job, name):
        changed = rows
        for transform in job.transforms:
            changed = transform.embedding(changed)
        yield name, changed.to(job.dtype)


def head(source: Checkpoint, job: Job) -> Iterator[tuple[str, Tensor]]:
    """The final norm, then the rows of the head unless it stays tied to the embedding."""
    family = job.family
    norm_name, head_name = f"{family.final_norm}.weight", f"{family.head}.weight"
    norms = [finite(norm_name, source.read(norm_name))]  # before each transform, and after the last
    for transform in job.transforms:
        norms.append(transform.final_norm(norms[-1]))
    yield norm_name, norms[-1].to(job.dtype)
    if job.tied and not job.unties:
        return
    for rows in _rows(source, job, f"{family.embedding}.weight" if job.tied else head_name):
        changed = rows
        for transform, norm in zip(job.transforms, norms, strict=False):
            changed = transform.head(changed, norm)
        yield head_name, changed.to(job.dtype)


def _rows(source: Checkpoint, job: Job, name: str) -> Iterator[Tensor]:
    rows, columns = source.entry(name).shape
    step = max(1, PIECE_BYTES // (columns * job.dtype.itemsize))
    for start in range(0, rows, step):
        yield finite(name, source.read(name, slice(start, start + step)))


def finite(name: str, tensor: Tensor) -> Tensor:
    """``tensor``, if it holds no NaN or Inf.

    Raises:
        QtoolError: naming it and how many there are.
    """
    if not torch.isfinite(tensor).all():
        bad = int((~torch.isfinite(tensor)).sum())
        raise QtoolError(f"{name}: holds {bad} NaN or Inf values; the checkpoint is damaged")
    return tensor
