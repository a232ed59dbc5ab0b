"""Checks the blocks and notes that methods leave behind, also methods of other packages."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.method import Transform
from qtool.errors import QtoolError, suggest
from qtool.io.finite import is_finite
from qtool.pipeline.job import Job


def apply(transform: Transform, block: Block, batches: Sequence[Batch], job: Job) -> None:
    """Let ``transform`` rewrite ``block`` in place.

    Raises:
        QtoolError: the transform returns something instead, or gives a tensor another shape.
    """
    if (returned := transform.apply(block, batches)) is not None:  # type: ignore[func-returns-value]
        raise QtoolError(
            f"{transform.name}: apply returns {type(returned).__name__}; it is to rewrite the block"
            " in place and to return None"
        )
    found = block.parameters()
    for name, shape in job.block_shapes(block.index).items():
        if name in found and tuple(found[name].shape) != tuple(shape):
            raise QtoolError(
                f"{transform.name}: apply makes {job.full(block.index, name)} of shape"
                f" {list(found[name].shape)}; {list(shape)} is expected"
            )


def require_stored(block: Block, job: Job) -> None:
    """Refuse decisions of transforms about ``block`` that the result could not store.

    Raises:
        QtoolError: names the linear.
    """
    for name in block.permutations:
        full = job.full(block.index, name)
        if name not in block.schemes or not job.format.is_permuted(full):
            why = "none names it in permutes" if name in block.schemes else "it stays in 16 bits"
            raise QtoolError(
                f"{full}: a transform permutes its inputs, and {why}, so that the order would not"
                " be stored"
            )
    for name in sorted(block.rotated):
        full = job.full(block.index, name)
        linear_format = job.format.of(full)
        if linear_format is None or not linear_format.rotated:
            why = "it stays in 16 bits" if linear_format is None else "none names it in rotates"
            raise QtoolError(
                f"{full}: a transform rotates its inputs, and {why}, so that nothing would rotate "
                "them at run time"
            )
    for name in block.schemes:
        full = job.full(block.index, name)
        linear_format = job.format.of(full)
        if linear_format and linear_format.rotated and name not in block.rotated:
            raise QtoolError(
                f"{full}: a transform names it in rotates, and none rotates its inputs, so that "
                "only the run time would"
            )
    for name in sorted(block.clips.keys() - job.linears(block.index).keys()):
        raise QtoolError(
            f"a transform chooses a clip for {name!r}, no linear of block {block.index}: "
            + suggest(name, job.linears(block.index))
        )


def require_json(notes: Mapping[str, Any]) -> None:
    """Refuse notes that cannot be written.

    Raises:
        QtoolError: names the method.
    """
    for method, noted in notes.items():
        try:
            json.dumps(noted)
        except (TypeError, ValueError) as error:
            raise QtoolError(f"{method}: its notes of a block are not JSON: {error}") from error


@contextmanager
def naming_too_large(block: Block, prefix: str) -> Iterator[None]:
    """Let an error name the weight that is not finite, if there is one.

    ``prefix`` is put before the names within the block.
    """
    try:
        yield
    except QtoolError as error:
        for name in block.schemes:
            if not is_finite(block.weight(name)):
                raise QtoolError(
                    f"{prefix}{name}.weight: its values are too large: the transforms make NaN or "
                    "Inf of them"
                ) from error
        raise
