"""Stacks of linears of one scheme and shape, which searches and rounding process together.

A scheme treats each output channel by itself, so one call takes the channels of several linears. A
block may have hundreds of small experts; one by one, kernel launches would take most of a GPU's
time. Each linear gets the same result as alone, except for the order of sums in a GPU's products.

Legend: S linears at once, N output channels, K input channels, T tokens.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from qtool.models.parts import LinearGroup
from qtool.schemes.base import ClipRatio

if TYPE_CHECKING:
    from qtool.calibration.block import Block

Item = TypeVar("Item")

#: most bytes that linears hold together on a CPU (so that they stay in its caches) and on a GPU; a
#: single linear may hold more
TOGETHER = 4 << 20, 2 << 30


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """S tensors of one shape as ``[S, ...]``; a single tensor is not copied."""
    return tensors[0][None] if len(tensors) == 1 else torch.stack(list(tensors))


def products(a: Tensor, b: Tensor) -> Tensor:
    """``a_s b_s`` of ``a [S, T, K]``, or one ``a [1, T, K]`` for all, and ``b [S, K, L]``.

    It is one operation on a GPU; elsewhere each product has the same bits as alone.
    """
    if a.is_cuda:
        return a @ b
    return stack([one @ own for one, own in zip(a.expand(len(b), -1, -1), b, strict=True)])


def by_role(groups: Iterable[LinearGroup]) -> Iterator[list[LinearGroup]]:
    """The groups in their order, in lists: a dense group alone, groups of experts by their role.

    The role of an expert's group is its part of the MLP: gate and up, or down.
    """

    def role(group: LinearGroup) -> object:
        return group.fold if group.routed else group.linears

    for _, same in groupby(groups, role):
        yield list(same)


def by_kind(block: "Block", names: Iterable[str]) -> list[list[str]]:
    """``names`` in lists of one scheme and shape, in the order of their first names.

    A linear is alone if its output channels share a parameter, or if the quantizer of its input
    depends on one.
    """
    kinds: dict[Hashable, list[str]] = {}
    for name in names:
        scheme = block.schemes.get(name)
        own = scheme and (scheme.shared_params or scheme.input_quantizer is None)
        kind = scheme and scheme.kind
        kinds.setdefault((kind, block.weight(name).shape, own and name), []).append(name)
    return list(kinds.values())


def in_turn(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    """``items`` in parts of ``size``."""
    return (items[start : start + size] for start in range(0, len(items), size))


def packed_in_turn(names: Sequence[str], n: int, k: int, on_gpu: bool) -> Iterator[Sequence[str]]:
    """Parts of linears ``[n, k]`` whose codes are packed, checked or dequantized together.

    This holds at most 16 bytes for each code.
    """
    return in_turn(names, at_once(16 * n * k, on_gpu))


def search_bytes(n: int, k: int, tokens: int) -> int:
    """Bytes that a search holds for a linear ``[n, k]``, in float32.

    It holds five tensors of the weight's size (the weight, a candidate, the rounded candidate and
    two more), four of the inputs' size and three of the outputs' size.
    """
    return 4 * (5 * n * k + 4 * tokens * k + 3 * tokens * n)


def at_once(nbytes: int, on_gpu: bool) -> int:
    """The number of linears that are processed together if each holds ``nbytes``."""
    return max(1, TOGETHER[on_gpu] // nbytes)


def searched_in_turn(block: "Block", names: Iterable[str], tokens: int) -> Iterator[Sequence[str]]:
    """Parts of ``names`` of one scheme and shape that a search on ``tokens`` processes together."""
    for alike in by_kind(block, names):
        n, k = block.weight(alike[0]).shape
        size = at_once(search_bytes(n, k, tokens), block.device.type == "cuda")
        yield from in_turn(alike, size)


def stacked_weights(block: "Block", names: Sequence[str]) -> Tensor:
    """The weights ``[S, N, K]`` float32 of linears of one shape; a single one is not copied."""
    return stack([block.weight(name) for name in names]).float()


def padded(inputs: Sequence[Tensor]) -> Tensor:
    """Inputs ``[T_s, K]`` of S linears as ``[S, T, K]``, with zeros after the shorter ones."""
    if len(inputs) == 1:
        return inputs[0][None]
    return torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True)


def clips_of(block: "Block", names: Sequence[str]) -> tuple[ClipRatio, ClipRatio]:
    """The clips chosen for linears of one input: for all channels, and ``[channels, G]``.

    A clip is 1 if none was chosen.
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
    """The joined clips ``[sum of rows, *tail]`` of linears with these numbers of ``rows``."""
    parts = (
        c.expand(n, *tail) if isinstance(c, Tensor) else torch.full((n, *tail), c, device=device)
        for c, n in zip(clips, rows, strict=True)
    )
    return torch.cat(list(parts))
