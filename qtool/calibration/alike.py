"""Linears of one scheme and shape, which searches and rounding look at together.

A scheme sees each output channel by itself, so one call takes the channels of several linears. The
experts of a block are hundreds of small ones: one by one, most of a GPU's time would go to
launches. Each gets what it gets alone; only a GPU's matrix products may add in another order.

Legend: S linears at once, N output channels, K input channels, T tokens.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from qtool.calibration.block import Block
from qtool.calibration.precision import stack
from qtool.models.parts import LinearGroup

Item = TypeVar("Item")

#: bytes that a search holds on a CPU, in whose caches they should stay, and on a GPU: of as many
#: linears together as take no more, of one in any case
TOGETHER = 4 << 20, 4 << 30


def successive(groups: Iterable[LinearGroup]) -> Iterator[list[LinearGroup]]:
    """The groups one after another; equal parts of all experts come together."""

    def role(group: LinearGroup) -> object:
        return group.fold if group.routed else group.linears

    for _, same in groupby(groups, role):
        yield list(same)


def alike(block: Block, names: Iterable[str]) -> list[list[str]]:
    """``names`` gathered by scheme and shape, each kind where its first comes.

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


def in_turn(items: Sequence[Item], nbytes: int, device: torch.device) -> Iterator[Sequence[Item]]:
    """Parts of ``items`` that are looked at together, where each holds ``nbytes``."""
    size = at_once(nbytes, device.type == "cuda")
    return (items[start : start + size] for start in range(0, len(items), size))


def at_once(nbytes: int, on_gpu: bool) -> int:
    """How many linears are looked at together where each holds ``nbytes``."""
    return max(1, TOGETHER[on_gpu] // nbytes)


def search_bytes(n: int, k: int, tokens: int) -> int:
    """Bytes that the search of a linear ``[n, k]`` holds, float32.

    The weight, a candidate, what it is rounded to and two more of their size; the inputs likewise
    thrice; two of the size of the outputs.
    """
    return 4 * (5 * n * k + 3 * tokens * k + 2 * tokens * n)


def stacked_weights(block: Block, names: Sequence[str]) -> Tensor:
    """The weights ``[S, N, K]`` float32 of linears of one shape; a single one is not copied."""
    return stack([block.weight(name) for name in names]).float()


def padded(inputs: Sequence[Tensor]) -> Tensor:
    """Inputs ``[T_s, K]`` of S linears as ``[S, T, K]``, zeros behind the shorter ones."""
    if len(inputs) == 1:
        return inputs[0][None]
    return torch.nn.utils.rnn.pad_sequence(list(inputs), batch_first=True)
