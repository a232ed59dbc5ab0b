"""Batches of activations between blocks: hidden states, and other tensors that blocks pass on.

Legend: B sequences in a batch, S tokens, H hidden size.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from qtool.models.family import Family
from qtool.models.skeleton import block_arguments

if TYPE_CHECKING:  # transformers takes seconds to import; `plan` needs none of it
    from transformers import PreTrainedModel


#: the name of the hidden states among the tensors that a block passes on
HIDDEN = "hidden"


@dataclass(frozen=True)
class BlockArguments:
    """All blocks' arguments other than the hidden states; None for a block that is passed over.

    ``axes`` has the structure of the arguments; for each tensor it holds the dimension of the
    sequences, or None if all sequences share the tensor.
    """

    values: Sequence[dict[str, Any] | None]
    axes: Sequence[dict[str, Any] | None]

    def __getitem__(self, block: int) -> dict[str, Any] | None:
        return self.values[block]

    def part(self, sequences: slice, size: int) -> "BlockArguments":
        """The arguments of some of ``size`` sequences."""
        return BlockArguments(_cut(self.values, self.axes, sequences, size), self.axes)


@dataclass
class Batch:
    """Hidden states ``[B, S, H]`` entering a block, and the other arguments of all blocks.

    Attributes:
        hidden: the hidden states.
        kwargs: the other arguments of all blocks.
        passed: other tensors that earlier blocks pass on, by name (:mod:`qtool.models.passed`).
        added_tokens: bool ``[B, S, E]``, tokens that experts observe besides those routed to them.
        axis: dimension of the sequences in ``hidden``: 1 in Gemma 3n's ``[streams, B, S, H]`` and
            in XLNet's ``[S, B, H]``, 0 in DeepSeek-V4's ``[B, S, streams, H]``. S may be more than
            the tokens: CPM-Ant puts a prompt before them.
    """

    hidden: Tensor
    kwargs: BlockArguments
    passed: dict[str, Tensor] = field(default_factory=dict)
    added_tokens: Tensor | None = None
    axis: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """B and S."""
        tokens = 0 if self.axis == self.hidden.dim() - 2 else self.axis + 1
        return self.hidden.shape[self.axis], self.hidden.shape[tokens]

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors that the previous block passed on, by name."""
        return {HIDDEN: self.hidden, **self.passed}

    def halves(self) -> Iterator["Batch"]:
        """The first and the second half of the sequences."""
        size, _ = self.shape
        for part in (slice(None, size // 2), slice(size // 2, None)):
            yield self.part(part)

    def part(self, sequences: slice) -> "Batch":
        """A batch of some of the sequences."""
        size, _ = self.shape
        kwargs = self.kwargs.part(sequences, size)
        passed = {name: tensor[sequences] for name, tensor in self.passed.items()}
        added = None if self.added_tokens is None else self.added_tokens[sequences]
        hidden = self.hidden[(slice(None),) * self.axis + (sequences,)]
        return Batch(hidden, kwargs, passed, added, self.axis)

    def joined(self, parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The outputs of a block for all sequences, from its outputs for parts of them."""
        return {
            name: torch.cat([part[name] for part in parts], self.axis if name == HIDDEN else 0)
            for name in parts[0]
        }

    def keep(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace all passed tensors by ``tensors``, in the place where the batch is stored."""
        stored = {name: self.stored(name, tensor) for name, tensor in tensors.items()}
        self.hidden, self.passed = stored.pop(HIDDEN), stored

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor`` moved to the batch's place; it may overwrite the tensor ``name`` there."""
        return tensor.to(self.hidden.device)

    def reusable(self, name: str, tensor: Tensor) -> Tensor | None:
        """The batch's tensor ``name`` if ``tensor`` fits its memory: has its shape and dtype."""
        own = self.tensors.get(name)
        fits = own is not None and (own.shape, own.dtype) == (tensor.shape, tensor.dtype)
        return own if fits else None

    def plain(self) -> "Batch":
        """The batch in the form in which it is sent to other ranks."""
        return Batch(self.hidden, self.kwargs, self.passed, axis=self.axis)


class Batches(list[Batch]):
    """This rank's share of the calibration batches.

    ``shapes`` holds ``(B, S)`` of the batches of all ranks, in order.
    """

    def __init__(self, own: Iterable[Batch], shapes: Iterable[tuple[int, int]]) -> None:
        super().__init__(own)
        self.shapes = list(shapes)


def axes_of(one: Any, two: Any) -> Any:
    """The :attr:`BlockArguments.axes` of an argument, from its values for one and two sequences."""
    if isinstance(one, Tensor):
        sizes = enumerate(zip(one.shape, two.shape, strict=True))
        return next((axis for axis, (single, double) in sizes if double == 2 * single > 0), None)
    if isinstance(one, (tuple, list)):
        return [axes_of(*both) for both in zip(one, two, strict=True)]
    if isinstance(one, dict):
        return {key: axes_of(one[key], two[key]) for key in one}
    return None


def _cut(value: Any, axes: Any, part: slice, size: int) -> Any:
    """``value`` with the tensors in it cut to some of ``size`` sequences along ``axes``.

    A sequence may have several rows in this dimension, as in ALiBi's ``[B H, 1, S]``.
    """
    if isinstance(value, Tensor):
        if axes is None:
            return value
        whole = value.unflatten(axes, (size, -1))
        return whole[(slice(None),) * axes + (part,)].flatten(axes, axes + 1)
    if isinstance(value, (tuple, list)):
        return type(value)(_cut(v, a, part, size) for v, a in zip(value, axes, strict=True))
    if isinstance(value, dict):
        return {key: _cut(v, axes[key], part, size) for key, v in value.items()}
    return value


def to_device(value: Any, device: torch.device) -> Any:
    """``value`` with its tensors (in tuples and dicts too) on ``device``."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), value)


@torch.no_grad()
def first_inputs(
    model: "PreTrainedModel",
    family: Family,
    tokens: Sequence[Tensor],
    keep: Callable[[Tensor, BlockArguments], Batch] = Batch,
) -> list[Batch]:
    """The inputs of block 0 and the other arguments of all blocks, for each ``tokens [B, S]``.

    ``model`` is a skeleton with a filled embedding; its blocks need no weights. ``keep`` makes a
    batch from the hidden states and the arguments.
    """
    batches = []
    alone, twice = (block_arguments(model, family, tokens[0][:1].repeat(n, 1)) for n in (1, 2))
    axis, axes = axes_of(alone, twice)
    for ids in tokens:
        hidden, kwargs = block_arguments(model, family, ids)
        batch = keep(hidden, BlockArguments(kwargs, axes))
        batch.axis = axis
        batches.append(batch)
    return batches
