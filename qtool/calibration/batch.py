"""Batches of what flows through the blocks: hidden states, and what else blocks hand on.

Legend: B sequences in a batch, S tokens, H hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtool.models.family import Family
from qtool.models.skeleton import block_arguments

if TYPE_CHECKING:  # transformers takes seconds to import; `plan` needs none of it
    from transformers import PreTrainedModel


#: the hidden states among the tensors that a block hands on
HIDDEN = "hidden"


@dataclass(frozen=True)
class BlockArguments:
    """All blocks' arguments beside the hidden states.

    ``rows``: the same structure, with the rows of a sequence for each tensor; 0 where all
    sequences share it.
    """

    values: Sequence[dict[str, Any]]
    rows: Sequence[dict[str, Any]]

    def __getitem__(self, block: int) -> dict[str, Any]:
        return self.values[block]

    def part(self, sequences: slice, size: int) -> "BlockArguments":
        """Those of some of ``size`` sequences."""
        return BlockArguments(_cut(self.values, self.rows, sequences, size), self.rows)


@dataclass
class Batch:
    """Hidden states ``[B, S, H]`` entering a block, and the other arguments of all blocks.

    ``passed``: what else the blocks before hand on, by name (:mod:`qtool.models.passed`).
    ``more``: bool ``[B, S, E]``, tokens that experts observe beside those routed to them.
    ``axis``: of the sequences in ``hidden``; 1 of Gemma 3n's ``[streams, B, S, H]``.
    """

    hidden: Tensor
    kwargs: BlockArguments
    passed: dict[str, Tensor] = field(default_factory=dict)
    more: Tensor | None = None
    axis: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """B and S."""
        return self.hidden.shape[self.axis], self.hidden.shape[self.axis + 1]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All that the block before handed on."""
        return {HIDDEN: self.hidden, **self.passed}

    def halves(self) -> Iterator["Batch"]:
        """The first and the second half of the sequences."""
        size, _ = self.shape
        for part in (slice(None, size // 2), slice(size // 2, None)):
            yield self.part(part)

    def part(self, sequences: slice) -> "Batch":
        """Some of the sequences."""
        size, _ = self.shape
        kwargs = self.kwargs.part(sequences, size)
        passed = {name: tensor[sequences] for name, tensor in self.passed.items()}
        more = None if self.more is None else self.more[sequences]
        hidden = self.hidden[(slice(None),) * self.axis + (sequences,)]
        return Batch(hidden, kwargs, passed, more, self.axis)

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What a block hands on, from what it does of some sequences each."""
        return {
            name: torch.cat([part[name] for part in parts], self.axis if name == HIDDEN else 0)
            for name in parts[0]
        }

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all that was handed on by ``tensors``, in the place where it is stored."""
        stored = {name: self.stored(name, tensor) for name, tensor in tensors.items()}
        self.hidden, self.passed = stored.pop(HIDDEN), stored

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor`` in the batch's place, where there may be room for it under its name."""
        return tensor.to(self.hidden.device)

    def room(self, name: str, tensor: Tensor) -> Tensor | None:
        """What the batch has under this name, if it has the shape and dtype of ``tensor``."""
        own = self.tensors.get(name)
        fits = own is not None and (own.shape, own.dtype) == (tensor.shape, tensor.dtype)
        return own if fits else None

    def plain(self) -> "Batch":
        """What of it goes to other ranks."""
        return Batch(self.hidden, self.kwargs, self.passed, axis=self.axis)


class Batches(list[Batch]):
    """This rank's share of the calibration batches.

    ``shapes``: ``(B, S)`` of the batches of all ranks, in order.
    """

    def __init__(self, own: Iterable[Batch], shapes: Iterable[tuple[int, int]]) -> None:
        super().__init__(own)
        self.shapes = list(shapes)


def rows_of_a_sequence(one: Any, two: Any) -> Any:
    """The rows of each tensor in an argument, given for one sequence and for two."""
    if isinstance(one, Tensor):
        return len(one) if one.dim() and len(two) == 2 * len(one) else 0
    if isinstance(one, (tuple, list)):
        return [rows_of_a_sequence(*both) for both in zip(one, two, strict=True)]
    if isinstance(one, dict):
        return {key: rows_of_a_sequence(one[key], two[key]) for key in one}
    return 0


def _cut(value: Any, rows: Any, part: slice, size: int) -> Any:
    """``value`` with the tensors in it cut to some of ``size`` sequences of so many rows each."""
    if isinstance(value, Tensor):
        return value.unflatten(0, (size, rows))[part].flatten(0, 1) if rows else value
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(v, r, part, size) for v, r in zip(value, rows, strict=True))
    if isinstance(value, dict):
        return {key: _cut(v, rows[key], part, size) for key, v in value.items()}
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors (in tuples and dicts too) on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, (tuple, list)):
        return type(value)(to_device(v, device) for v in value)
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    return value


@torch.no_grad()
def first_inputs(
    model: "PreTrainedModel",
    family: Family,
    tokens: Sequence[Tensor],
    keep: Callable[[Tensor, BlockArguments], Batch] = Batch,
) -> list[Batch]:
    """The inputs of block 0 and the other arguments of all blocks, for each ``tokens [B, S]``.

    ``model`` is a skeleton whose embedding is filled; its blocks need no weights. ``keep`` makes a
    batch of both.
    """
    batches = []
    one, two = (block_arguments(model, family, tokens[0][:1].repeat(n, 1))[1] for n in (1, 2))
    rows = rows_of_a_sequence(one, two)
    for ids in tokens:
        hidden, kwargs = block_arguments(model, family, ids)
        batch = keep(hidden, BlockArguments(kwargs, rows))
        batch.axis = 0 if hidden.shape[:2] == ids.shape else 1
        batches.append(batch)
    return batches
