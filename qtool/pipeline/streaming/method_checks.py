"""Checks what methods return and what they change, also methods of other packages."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.method import Method, Rounding, Transform
from qtool.calibration.rounding.rounded import Rounded, stacked
from qtool.errors import CheckFailed, Interrupted, QtoolError, checking, described, suggest
from qtool.format import LinearFormat
from qtool.io.finite import is_finite
from qtool.models.auto import running
from qtool.pipeline.job import Job
from qtool.plugins import is_of, require_returned
from qtool.schemes.base import ClipRatio, Scheme


def running_method(method: Method, function: str, index: int) -> AbstractContextManager[None]:
    """Name ``function`` of ``method`` and block ``index`` in what the function raises while open.

    The run counts as interrupted: its blocks are kept, and it can be resumed once the function is
    corrected.
    """
    return running(fails=f"{method.name}: {function} fails on block {index}", kind=Interrupted)


def apply(transform: Transform, block: Block, batches: Sequence[Batch], job: Job) -> None:
    """Let ``transform`` rewrite ``block`` in place.

    Raises:
        QtoolError: the transform fails, returns something, gives a tensor another shape, or adds or
            removes one.
    """
    before = block.parameters().keys()
    with running_method(transform, "apply", block.index):
        returned = transform.apply(block, batches)  # type: ignore[func-returns-value]
    require_returned(transform, "apply", returned, NoneType)
    found = block.parameters()
    for name in sorted(before ^ found.keys()):
        does = "adds" if name in found else "removes"
        raise QtoolError(
            f"{transform.name}: apply {does} {job.full(block.index, name)}; the same tensors are"
            " expected"
        )
    for name, shape in job.block_shapes(block.index).items():
        if name in found:
            of = f" for {job.full(block.index, name)}"
            require_returned(transform, "apply", found[name], Tensor, of, shape)


def rewritten(transform: Transform, function: str, tensor: Tensor, found: Tensor) -> Tensor:
    """``found``, in which ``function`` of ``transform`` rewrote ``tensor``.

    Raises:
        QtoolError: it is no tensor of the same shape, or holds NaN or Inf.
    """
    require_returned(transform, function, found, Tensor, shape=tensor.shape)
    if found is not tensor and not is_finite(found):
        raise QtoolError(f"{transform.name}: {function} gives NaN or Inf")
    return found


def require_finite_parameters(stored: Mapping[str, Tensor]) -> None:
    """Refuse NaN and Inf in ``stored``, tensors of a block after its methods by full name.

    Raises:
        QtoolError: names the tensor.
    """
    for name, tensor in stored.items():
        if not is_finite(tensor):
            raise QtoolError(f"{name}: the methods make NaN or Inf of its values")


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
    for name, clips in block.clips.items():
        if not is_of(clips, tuple[ClipRatio, ClipRatio]):
            raise QtoolError(
                f"a transform chooses the clip {clips!r} for {job.full(block.index, name)}; a pair"
                " (clip, group_clip) is expected, each of them a float or a tensor"
            )
        if scheme := block.schemes.get(name):
            n, groups, _ = scheme.groups(block.weight(name)).shape
            found = [list(clip.shape) if isinstance(clip, Tensor) else [] for clip in clips]
            if found[0] not in ([], [n]) or found[1] not in ([], [n, groups]):
                raise QtoolError(
                    f"a transform chooses clips of shapes {found[0]} and {found[1]} for"
                    f" {job.full(block.index, name)}; [{n}] and [{n}, {groups}], or a number in"
                    " place of each, are expected"
                )


def require_packable(
    rounding: Rounding,
    found: Any,
    formats: Mapping[str, LinearFormat],
    shapes: Mapping[str, tuple[int, int]],
) -> None:
    """Refuse the result of ``rounding`` unless ``formats`` can pack it.

    Args:
        found: the result of its ``round``: a :class:`Rounded` for each linear of ``formats``.
        shapes: ``(N, K)`` of the linears.

    Raises:
        QtoolError: names the linear, what was found and what is expected.
    """
    require_returned(rounding, "round", found, Mapping)
    for name in sorted(formats.keys() ^ found.keys(), key=str):
        what = "something" if name in found else "nothing"
        raise QtoolError(
            f"{rounding.name}: round gives {what} for {name!r}; a Rounded for each linear that is"
            " quantized is expected"
        )
    for name, linear_format in formats.items():
        one, (n, k) = found[name], shapes[name]
        require_returned(rounding, "round", one, Rounded, f" for {name}")
        error, of = one.weight_error, f" as the weight_error of {name}"
        require_returned(rounding, "round", error, float | None, of)
        of = f" for the parameters of {name}"
        require_returned(rounding, "round", one.params, Mapping, of)
        codes = torch.empty(n, k, dtype=linear_format.scheme_object.code_dtype, device="meta")
        given, expected = (
            ", ".join(f"{part} {described(t)}" for part, t in sorted(tensors.items()))
            for tensors in (
                {"codes": one.codes, **one.params},
                {"codes": codes, **linear_format.parameters(n, k)},
            )
        )
        if given != expected:
            raise QtoolError(
                f"{rounding.name}: round gives {given} for {name}; {expected} is expected"
            )


def check_codes(scheme: Scheme, linears: Mapping[str, Rounded]) -> None:
    """:meth:`Scheme.check` for several linears of one shape at once.

    Raises:
        CheckFailed: names the linear.
    """
    try:
        scheme.check(*stacked(scheme, [*linears.values()]))
    except CheckFailed:
        for name, rounded in linears.items():
            with checking(name):
                scheme.check(rounded.codes, rounded.params)
        raise


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
