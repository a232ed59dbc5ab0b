"""Embedding, final norm and head, rewritten by the transforms a few rows at a time."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from qtool.calibration.method import Norm
from qtool.errors import QtoolError
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job

#: of a matrix that are in memory at a time
PIECE_BYTES = 64 << 20
CPU = torch.device("cpu")


def tables(source: Checkpoint, job: Job) -> Iterator[tuple[str, Tensor]]:
    """``(name, rows)`` of the embedding of the result, and of learned positions, in pieces."""
    for module in job.family.tables:
        yield from table(source, job, module)


def table(source: Checkpoint, job: Job, module: str) -> Iterator[tuple[str, Tensor]]:
    """``(name, rows)`` of one table of the result, in pieces."""
    name = f"{module}.weight"
    for rows in _rows(source, job, name):
        yield name, as_stored(name, _embedded(rows, job), job)


def table_rows(source: Checkpoint, job: Job, module: str, wanted: Tensor) -> Tensor:
    """Rows ``wanted [n]`` (sorted) of one table of the result, ``[n, H]``, where ``wanted`` is.

    The others are read and dropped.
    """
    name, start, found = f"{module}.weight", 0, []
    for rows in _rows(source, job, name, wanted.device):
        here = wanted[(wanted >= start) & (wanted < start + len(rows))] - start
        found.append(as_stored(name, _embedded(rows[here], job), job))
        start += len(rows)
    return torch.cat(found)


def _embedded(rows: Tensor, job: Job) -> Tensor:
    for transform in job.transforms:
        rows = transform.embedding(rows)
    return rows


def head(source: Checkpoint, job: Job) -> Iterator[tuple[str, Tensor]]:
    """The final norm, the rows of the head unless it stays tied, and what the family does not know."""
    yield from _norm_and_head(source, job)
    for name in job.unknown:
        yield name, source.read(name)


def _norm_and_head(source: Checkpoint, job: Job) -> Iterator[tuple[str, Tensor]]:
    family = job.family
    head_name = f"{family.head}.weight"
    norms = [_final_norm(source, job)]  # before each transform, and after the last
    for transform in job.transforms:
        norms.append(transform.final_norm(norms[-1]))
    for part, stored in norms[-1].stored().items():
        name = f"{family.final_norm}.{part}"
        yield name, as_stored(name, stored, job)
    if job.tied and not job.unties:
        return
    for rows in _rows(source, job, f"{family.embedding}.weight" if job.tied else head_name):
        changed = rows
        for transform, norm in zip(job.transforms, norms, strict=False):
            changed = transform.head(changed, norm.gain)
        yield head_name, as_stored(head_name, changed, job)


def _final_norm(source: Checkpoint, job: Job) -> Norm:
    parts = (f"{job.family.final_norm}.{part}" for part in ("weight", "bias"))
    weight, bias = (finite(name, source.read(name)) if name in source else None for name in parts)
    assert weight is not None  # the source was checked
    return Norm.of(weight, bias, job.family.norm_offset)


def require_tied(source: Checkpoint, job: Job) -> None:
    """Refuse a stored head that differs from the embedding it is tied to; reads both.

    Loaders disagree on such a model: transformers 5 takes the stored head, older ones and vLLM the
    embedding.
    """
    head, embedding = f"{job.family.head}.weight", f"{job.family.embedding}.weight"
    if not job.tied or head not in source:
        return
    pairs = zip(_rows(source, job, head), _rows(source, job, embedding), strict=True)
    if source.entry(head).shape != source.entry(embedding).shape or not all(
        torch.equal(a.to(b), b) for a, b in pairs
    ):
        raise QtoolError(
            f"{head} is not {embedding}, although config.json ties the two: set "
            "tie_word_embeddings to false there if the model has a head of its own, or remove that "
            "tensor"
        )


def _rows(source: Checkpoint, job: Job, name: str, device: torch.device = CPU) -> Iterator[Tensor]:
    rows, columns = source.entry(name).shape
    step = max(1, PIECE_BYTES // (columns * job.dtype.itemsize))
    for start in range(0, rows, step):
        yield finite(
            name,
            source.read(name, slice(start, start + step), pinned=device.type == "cuda").to(device),
        )


def as_stored(name: str, tensor: Tensor, job: Job) -> Tensor:
    """``tensor`` in the dtype in which the result stores it under its full ``name``.

    Raises:
        QtoolError: values beyond what float16 holds, where the model is cast to it.
    """
    cast = tensor.to(job.stored_dtype(name))
    if cast.dtype == torch.float16 != tensor.dtype and not _only_finite(cast):
        raise QtoolError(
            f"{name}: its largest value {float(tensor.abs().max()):.3g} is beyond float16's 65504; "
            "pass --dtype bfloat16"
        )
    return cast


def all_finite(tensors: Mapping[str, Tensor]) -> None:
    """:func:`finite` of every tensor by name: a GPU is waited for once."""
    if tensors and not torch.stack([_only_finite(tensor) for tensor in tensors.values()]).all():
        for name, tensor in tensors.items():
            finite(name, tensor)


def finite(name: str, tensor: Tensor) -> Tensor:
    """``tensor``, if it holds no NaN or Inf.

    Raises:
        QtoolError: naming it and how many there are.
    """
    if not _only_finite(tensor):
        bad = int((~torch.isfinite(tensor)).sum())
        raise QtoolError(f"{name}: holds {bad} NaN or Inf values; the checkpoint is damaged")
    return tensor


def _only_finite(tensor: Tensor) -> Tensor:
    """Whether no element is NaN or Inf, ``[]``.

    A CPU looks at the extremes, which show both in a fraction of the time.
    """
    on_cpu = tensor.device.type == "cpu" and tensor.numel() > 0
    return torch.isfinite(torch.stack(torch.aminmax(tensor)) if on_cpu else tensor).all()
