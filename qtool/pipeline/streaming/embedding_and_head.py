"""Lets the transforms rewrite embedding, final norm and head, a few rows at a time on a device.

The transforms get the rows in float32, whatever the source's dtype is, and the rows are rounded
once, to the dtype of the result.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qtool.calibration.method import Norm
from qtool.errors import QtoolError
from qtool.io.finite import finite_rows, is_finite, require_finite
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.streaming.method_checks import rewritten, running_method
from qtool.plugins import require_returned


def tables(source: Checkpoint, job: Job, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """``(name, rows)`` of the result's embedding and learned positions, a few rows at a time."""
    for module in job.family.tables:
        name = f"{module}.weight"
        for rows in _rows(source, name, device):
            yield name, as_stored(name, embedded(rows, job), job)
            del rows  # they would be held while the next ones are read


def table_rows(source: Checkpoint, job: Job, module: str, wanted: Tensor) -> Tensor:
    """Rows ``wanted [n]`` (sorted) of one table of the result, ``[n, H]``, on wanted's device.

    The other rows are read and dropped.
    """
    name, start, found = f"{module}.weight", 0, []
    for rows in _rows(source, name, wanted.device):
        here = wanted[(wanted >= start) & (wanted < start + len(rows))] - start
        found.append(as_stored(name, embedded(rows[here], job), job))
        start += len(rows)
    return torch.cat(found)


def embedded(rows: Tensor, job: Job) -> Tensor:
    """Rows ``[n, H]`` of the embedding, or directions of the residual stream, rewritten."""
    for transform in job.transforms:
        with running_method(transform, "embedding"):
            found = transform.embedding(rows)
        rows = rewritten(transform, "embedding", rows, found)
    return rows


def _rows(source: Checkpoint, name: str, device: torch.device) -> Iterator[Tensor]:
    return map(_widened, finite_rows(source, name, device))


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.itemsize < 4 else tensor


def head(source: Checkpoint, job: Job, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """The final norm, the head's rows unless it stays tied, and all tensors beside them."""
    yield from _norm_and_head(source, job, device)
    for name in job.family.outside:
        if name in job.family.entering:
            yield name, _entering(source, name, job, device)
        else:
            yield name, source.read(name)
    for name in job.unknown:
        yield name, source.read(name)


def _entering(source: Checkpoint, name: str, job: Job, device: torch.device) -> Tensor:
    """A tensor whose channels are added to the residual stream, rewritten as the embedding is."""
    dim, stored = job.family.entering[name], source.read(name)
    of_stream = _widened(require_finite(name, stored.to(device))).movedim(dim, -1)
    rows = embedded(of_stream.reshape(-1, of_stream.shape[-1]), job)
    return as_stored(name, rows.reshape(of_stream.shape).movedim(-1, dim).contiguous(), job)


def _norm_and_head(
    source: Checkpoint, job: Job, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    family = job.family
    head_name = f"{family.head}.weight"
    norms = [_final_norm(source, job)]  # the norm before each transform, and after the last one
    for transform in job.transforms:
        with running_method(transform, "final_norm"):
            norm = transform.final_norm(norms[-1])
        require_returned(transform, "final_norm", norm, Norm)
        rewritten(transform, "final_norm", norms[-1].gain, norm.gain)
        norms.append(norm)
    for part, stored in norms[-1].stored().items() if family.final_norm else ():
        name = f"{family.final_norm}.{part}"
        yield name, as_stored(name, stored, job)
    if job.tied and not job.unties:
        return

    def stored_head(rows: Tensor) -> tuple[str, Tensor]:
        for transform, norm in zip(job.transforms, norms, strict=False):
            with running_method(transform, "head"):
                of_head = transform.head(rows, norm.gain.to(device))
            rows = rewritten(transform, "head", rows, of_head)
        return head_name, as_stored(head_name, rows, job)

    yield from map(stored_head, _head_rows(source, job, device))


def final_head(
    source: Checkpoint, job: Job, device: torch.device
) -> tuple[Tensor, Iterator[Tensor]]:
    """The gain ``[H]`` of the source's final norm, and the rows of its head, a few at a time."""
    return _final_norm(source, job).gain.to(device).float(), _head_rows(source, job, device)


def _head_rows(source: Checkpoint, job: Job, device: torch.device) -> Iterator[Tensor]:
    module = job.family.embedding if job.tied else job.family.head
    return _rows(source, f"{module}.weight", device)


def _final_norm(source: Checkpoint, job: Job) -> Norm:
    parts = (f"{job.family.final_norm}.{part}" for part in ("weight", "bias"))
    weight, bias = (
        _widened(require_finite(name, source.read(name))) if name in source else None
        for name in parts
    )
    if weight is None:  # no transform changes a norm without a weight
        weight = torch.ones(job.family.dimensions(job.namespace)["hidden"])
    return Norm.of(weight, bias, job.family.norm_offset)


def as_stored(name: str, tensor: Tensor, job: Job) -> Tensor:
    """``tensor`` in the dtype in which the result stores it under its full ``name``.

    Raises:
        QtoolError: the model is cast to float16, which does not hold some value.
    """
    cast = tensor.to(job.stored_dtype(name))
    if cast.dtype == torch.float16 != tensor.dtype and not is_finite(cast):
        raise QtoolError(
            f"{name}: its largest value {float(tensor.abs().max()):.3g} is beyond float16's 65504; "
            "pass --dtype bfloat16"
        )
    return cast
