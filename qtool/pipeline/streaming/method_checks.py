"""Checks what methods return and what they change, also methods of other packages."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.method import Method, Rounding, Transform
from qtool.calibration.rounding.rounded import Rounded, stacked
from qtool.distributed import ranks
from qtool.errors import CheckFailed, Interrupted, QtoolError, checking, described, suggest
from qtool.format import LinearFormat
from qtool.io.finite import is_finite
from qtool.models.auto import running
from qtool.pipeline.job import Job
from qtool.plugins import is_of, require_returned
from qtool.schemes.base import ClipRatio, Params, Scheme


def running_method(
    method: Method, function: str, index: int | None = None
) -> AbstractContextManager[None]:
    """Name ``function`` of ``method`` and block ``index`` in what the function raises while open.

    The run counts as interrupted: its blocks are kept, and it can be resumed once the function is
    corrected.
    """
    where = "" if index is None else f" on block {index}"
    return running(fails=f"{method.name}: {function} fails{where}", kind=Interrupted)


def apply(transform: Transform, block: Block, batches: Sequence[Batch], job: Job) -> None:
    """Let ``transform`` rewrite ``block`` in place.

    Raises:
        QtoolError: the transform fails, returns something, gives a tensor another shape, adds or
            removes one, or decides on each rank by itself.
    """
    before = block.parameters().keys()
    with running_method(transform, "apply", block.index):
        returned = transform.apply(block, batches)
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
    require_same_on_ranks(transform, "apply", block.index, _decided(block, found))


def _decided(block: Block, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All that a transform may have decided for ``block``, with what it is."""
    yield from parameters.items()
    for name, order in block.permutations.items():
        yield f"the input order of {name}", order
    for name, pair in block.clips.items():
        if is_of(pair, tuple[ClipRatio, ClipRatio]):  # others are refused after all transforms
            for kind, ratio in zip(("clip", "group clip"), pair, strict=True):
                yield f"the {kind} of {name}", torch.as_tensor(ratio)


def require_same_on_ranks(
    method: Method, function: str, index: int, tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Refuse named ``tensors`` of block ``index`` that a foreign method finds on each rank alone.

    Compared are the sums of their bytes along each dimension. A method of this package is not
    checked.

    Raises:
        QtoolError: names the first that differs.
    """
    if ranks.size() == 1 or type(method).__module__.startswith("qtool."):
        return
    of_ranks = ranks.all_gather({name: _byte_sums(tensor) for name, tensor in tensors})
    for name, own in of_ranks[0].items():
        for other in of_ranks[1:]:
            if name not in other or not all(map(torch.equal, own, other[name])):
                raise QtoolError(
                    f"{method.name}: {function} gives {name} of block {index} other values on"
                    " another rank; a rank sees its own batches only, and all_gather_batches and"
                    " OrderedSum of qtool.distributed.ranks join what is found in them"
                )


def _byte_sums(tensor: Tensor) -> list[Tensor]:
    """The sums of the bytes of ``tensor`` along each of its dimensions, int64."""
    stored = torch.atleast_1d(tensor.detach()).contiguous().view(torch.uint8)
    return [stored.sum(axis, dtype=torch.int64) for axis in range(stored.dim())]


def rewritten(transform: Transform, function: str, tensor: Tensor, found: Tensor) -> Tensor:
    """``found``, in which ``function`` of ``transform`` rewrote ``tensor``.

    Raises:
        QtoolError: it is no tensor of the same shape, or holds NaN or Inf.
    """
    require_returned(transform, function, found, Tensor, shape=tensor.shape)
    if found is not tensor and not is_finite(found):
        raise QtoolError(f"{transform.name}: {function} gives NaN or Inf")
    return found


def require_finite_parameters(tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN and Inf in ``tensors`` of a block that methods changed, by full name.

    Raises:
        QtoolError: names the tensor.
    """
    for name, tensor in tensors.items():
        if not is_finite(tensor):
            raise QtoolError(
                f"{name}: its values are too large: the methods make NaN or Inf of them"
            )


@contextmanager
def naming_too_large(block: Block, job: Job) -> Iterator[None]:
    """Let an error name the tensor of ``block`` that is not finite, if there is one."""
    try:
        yield
    except QtoolError:
        expected = job.block_shapes(block.index)
        found = {
            job.full(block.index, n): t for n, t in block.parameters().items() if n in expected
        }
        require_finite_parameters(found)
        raise


def require_stored(block: Block, job: Job) -> None:
    """Refuse decisions of transforms about ``block`` that the result could not store.

    Raises:
        QtoolError: names the linear.
    """
    formats = {name: job.format.of(job.full(block.index, name)) for name in block.schemes}
    permutes = {name for name in formats if job.format.is_permuted(job.full(block.index, name))}
    rotates = {name for name, found in formats.items() if found and found.rotated}
    for does, done, stored in (
        ("permutes", block.permutations, permutes),
        ("rotates", block.rotated, rotates),
    ):
        for name in sorted({*done} - stored):
            why = f"none names it in {does}" if name in formats else "it stays in 16 bits"
            raise QtoolError(
                f"{job.full(block.index, name)}: a transform {does} its inputs, and {why}, so that"
                " the checkpoint would not say so"
            )
    for name in sorted(rotates - block.rotated):
        raise QtoolError(
            f"{job.full(block.index, name)}: a transform names it in rotates, and none rotates its"
            " inputs, so that only the run time would"
        )
    _require_clips(block, job)


def _require_clips(block: Block, job: Job) -> None:
    """Refuse clips for what is no linear of ``block``, and clips that ``Scheme.fit`` cannot take.

    Raises:
        QtoolError: names the linear.
    """
    for name in sorted(block.clips.keys() - job.linears(block.index).keys()):
        raise QtoolError(
            f"a transform chooses a clip for {name!r}, no linear of block {block.index}: "
            + suggest(name, job.linears(block.index))
        )
    for name, clips in block.clips.items():
        full = job.full(block.index, name)
        if not is_of(clips, tuple[ClipRatio, ClipRatio]):
            raise QtoolError(
                f"a transform chooses the clip {clips!r} for {full}; a pair (clip, group_clip) is"
                " expected, each of them a float or a tensor"
            )
        if not all(is_finite(torch.as_tensor(clip)) for clip in clips):
            raise QtoolError(f"a transform chooses a clip of NaN or Inf for {full}")
        if scheme := block.schemes.get(name):
            n, groups, _ = scheme.groups(block.weight(name)).shape
            found = [list(clip.shape) if isinstance(clip, Tensor) else [] for clip in clips]
            if found[0] not in ([], [n]) or found[1] not in ([], [n, groups]):
                raise QtoolError(
                    f"a transform chooses clips of shapes {found[0]} and {found[1]} for {full};"
                    f" [{n}] and [{n}, {groups}], or a number in place of each, are expected"
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
        if error is not None and not math.isfinite(error):
            raise QtoolError(f"{rounding.name}: round gives {error}{of}; a finite one is expected")
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
        devices = {str(tensor.device) for tensor in (one.codes, *one.params.values())}
        if len(devices) > 1 or "meta" in devices:
            raise QtoolError(
                f"{rounding.name}: round gives codes and parameters on"
                f" {', '.join(sorted(devices))} for {name}; one device, not meta, is expected"
            )


def require_no_new_bias(rounding: Rounding, block: Block, job: Job) -> None:
    """Refuse a bias that ``rounding`` gave to a module of ``block`` without one.

    Raises:
        QtoolError: names the bias, which the checkpoint would not hold.
    """
    for name in sorted(block.parameters().keys() - job.block_shapes(block.index).keys()):
        if name.endswith(".bias"):
            raise QtoolError(
                f"{rounding.name}: round adds {job.full(block.index, name)}; the same tensors are"
                " expected"
            )


def check_codes(scheme: Scheme, linears: Mapping[str, Rounded]) -> None:
    """:meth:`Scheme.check` for several linears of one shape at once.

    Raises:
        CheckFailed: names the linear.
        QtoolError: a weight is too large for a scale in float16; names the linear.
    """
    codes, params = stacked(scheme, [*linears.values()])
    try:
        scheme.check(codes, params)
    except CheckFailed:
        for name, rounded in linears.items():
            with checking(name):
                scheme.check(rounded.codes, rounded.params)
        raise
    if _saturated(params):
        name = next(name for name, rounded in linears.items() if _saturated(rounded.params))
        raise QtoolError(
            f"{name}: a scale of its weight is beyond float16's 65504; pass --dtype bfloat16"
        )


def _saturated(params: Params) -> bool:
    """Whether a scale is the largest number of float16, to which it was cut."""
    largest = torch.finfo(torch.float16).max
    return any(
        bool((tensor.abs() == largest).any())
        for tensor in params.values()
        if tensor.dtype == torch.float16
    )
