"""Packs the rounded linears of a block, and unpacks them into a block that runs.

Linears of one format and shape are packed together: one by one, kernel launches would take most of
the time of small experts on a GPU.

Legend: N x K a linear's weight.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from qtool.calibration.block import Block
from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.stacking import packed_in_turn
from qtool.distributed import ranks
from qtool.pipeline.job import Job
from qtool.pipeline.streaming.method_checks import check_codes


def packed(
    block: Block, job: Job, rounded: dict[str, Rounded], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """``(full name, tensor)`` of all packed linears; ``rounded`` is emptied meanwhile.

    Raises:
        CheckFailed: codes break an invariant of their scheme; each rank checks its share.
    """
    formats, prefix = job.formats(block.index), job.full(block.index, "")
    turns = list(_in_turn(block, job, device))
    for names in ranks.local_items(turns):
        scheme = formats[names[0]].scheme_object
        check_codes(scheme, {prefix + name: rounded[name] for name in names})
    for names in turns:
        linear_format, found = formats[names[0]], [rounded.pop(name) for name in names]
        stored = linear_format.pack_all([(one.codes, one.params) for one in found])
        for name, own in zip(names, stored, strict=True):
            for part, tensor in own.items():
                yield f"{prefix}{name}.{part}", tensor
    for name in formats:
        if job.format.is_permuted(prefix + name):
            order = block.permutations.get(name, torch.arange(block.weight(name).shape[1]))
            yield f"{prefix}{name}.permutation", order.to(torch.int32)


def install_packed(
    block: Block, job: Job, parts: Mapping[str, Tensor], device: torch.device
) -> None:
    """Let ``block`` compute with the packed linears among its stored tensors ``parts``.

    ``parts`` are named within the block.
    """
    linears, formats = job.linears(block.index), job.formats(block.index)
    for name, linear_format in formats.items():
        block.schemes[name] = linear_format.scheme_object
        if (order := parts.get(f"{name}.permutation")) is not None:
            block.permutations[name] = order.to(device, torch.int64)
        if linear_format.rotated:
            block.rotated.add(name)
    for names in _in_turn(block, job, device):
        linear_format, (n, k) = formats[names[0]], linears[names[0]]
        stored = [
            {part: parts[f"{name}.{part}"] for part in linear_format.tensors(n, k)}
            for name in names
        ]
        found = linear_format.unpack_all(stored, n, k)
        block.install({n: Rounded(*one) for n, one in zip(names, found, strict=True)})


def _in_turn(block: Block, job: Job, device: torch.device) -> Iterator[Sequence[str]]:
    """The packed linears of ``block``, in lists of one format and shape that memory holds."""
    shapes, kinds = job.linears(block.index), dict[Hashable, list[str]]()
    for name, linear_format in job.formats(block.index).items():
        alone = linear_format.scheme_object.shared_params and name
        kinds.setdefault((linear_format, shapes[name], alone), []).append(name)
    for names in kinds.values():
        yield from packed_in_turn(names, *shapes[names[0]], device.type == "cuda")
