"""Stacks of linears of one scheme and shape, which searches and rounding look at together.

A scheme sees each output channel by itself, so one call takes the channels of several linears. The
experts of a block are hundreds of small ones: one by one, most of a GPU's time would go to
launches. Each gets what it gets alone; only a GPU's matrix products may add in another order.

Legend: S linears at once, N output channels, K input channels, T tokens.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from qtool.calibration.precision import stack
from qtool.models.parts import LinearGroup
from qtool.schemes.base import ClipRatio

if TYPE_CHECKING:
    from qtool.calibration.block import Block

Item = TypeVar("Item")

#: bytes that are held on a CPU, in whose caches they should stay, and on a GPU: of as many linears
#: together as take no more, of one in any case
TOGETHER = 4 << 20, 2 << 30


def by_role(groups: Iterable[LinearGroup]) -> Iterator[list[LinearGroup]]:
    """The groups in their order, in lists of one role: a dense one alone, all experts' together.

    The role of an expert's group is its part of the MLP: gate and up, or down.
    """

    def role(group: LinearGroup) -> object:
        return group.fold if group.routed else group.linears

    for _, same in groupby(groups, role):
        yield list(same)


def by_kind(block: "Block", names: Iterable[str]) -> list[list[str]]:
    """``names`` in lists of one scheme and shape, each where its first comes.

    A linear whose output channels share a parameter, or whose input's quantizer depends on one, is
    alone.
    """
    kinds: dict[Hashable, list[str]] = {}
    for name in names:
        scheme = block.schemes.get(name)
        form = scheme and (type(scheme), scheme.group_size, scheme.scale_dtype)
        own = scheme and (scheme.shared_params or scheme.input_quantizer is None)
        kinds.setdefault((form, block.weight(name).shape, own and name), []).append(name)
    return list(kinds.values())


def in_turn(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """``items`` in parts of ``size``."""
    return (items[start : start + size] for start in range(0, len(items), size))


def packed_in_turn(names: Sequence[str], n: int, k: int, on_gpu: bool) -> Iterator[Sequence[str]]:
    """Parts of linears ``[n, k]`` whose codes are packed, checked or made weights together.

    That holds 16 bytes of each code at most.
    """
    return in_turn(names, at_once(16 * n * k, on_gpu))


def search_bytes(n: int, k: int, tokens: int) -> int:
    """Bytes that a search holds of a linear ``[n, k]``, in float32.

    The weight, a candidate, what that is rounded to and two more of their size; four of the size of
    its inputs, three of its outputs'.
    """
    return 4 * (5 * n * k + 4 * tokens * k + 3 * tokens * n)


def at_once(nbytes: int, on_gpu: bool) -> int:
    """How many linears are looked at together where each holds ``nbytes``."""
    return max(1, TOGETHER[on_gpu] // nbytes)


def searched_in_turn(block: "Block", names: Sequence[str], tokens: int) -> Iterator[Sequence[str]]:
    """Parts of ``names`` that a search looks at together; they are :func:`by_kind`."""
    n, k = block.weight(names[0]).shape
    return in_turn(names, at_once(search_bytes(n, k, tokens), block.device.type == "cuda"))


def stacked_weights(block: "Block", names: Sequence[str]) -> Tensor:
    """The weights ``[S, N, K]`` float32 of linears of one shape; a single one is not copied."""
    return stack([block.weight(name) for name in names]).float()


def padded(inputs: Sequence[Tensor]) -> Tensor:
    """Inputs ``[T_s, K]`` of S linears as ``[S, T, K]``, zeros behind the shorter ones."""
    if len(inputs) == 1:
        return inputs[0][None]
    return torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True)


def clips_of(block: "Block", names: Sequence[str]) -> tuple[ClipRatio, ClipRatio]:
    """The clips chosen for linears of one input: of all their channels, and ``[channels, G]``.

    They are 1 where none was chosen.
    """
    if not any(name in block.clips for name in names):
        return 1.0, 1.0
    weights = [block.weight(name) for name in names]
    groups = block.schemes[names[0]].groups(weights[0]).shape[1]
    clips, group_clips = zip(*(block.clips.get(name, (1.0, 1.0)) for name in names), strict=True)
    rows, device = [len(weight) for weight in weights], weights[0].device
    return stacked_clips(clips, rows, device), stacked_clips(group_clips, rows, device, groups)


def stacked_clips(
    clips: Sequence[ClipRatio], rows: Sequence[int], device: torch.device, *tail: int
) -> Tensor:
    """The clips of linears of so many ``rows``, one after another: ``[sum of rows, *tail]``."""
    parts = (
        c.expand(n, *tail) if isinstance(c, Tensor) else torch.full((n, *tail), c, device=device)
        for c, n in zip(clips, rows, strict=True)
    )
    return torch.cat(list(parts))
