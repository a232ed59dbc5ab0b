"""Linears that read one input, multiplied as one: q, k and v, or gate and up.

A packed weight whose tensors are stored by rows of output channels holds the rows of several
linears as well as those of one: concatenated, they are what packing the concatenated weight gives.
So the input is quantized once, and one GEMM has enough rows to fill the GPU. The linears stay the
modules that they were. Their tensors become views of the merged ones, hence names, state dict and
single products are as before; in a forward the first one that sees an input computes the product of
all, and each takes its columns of it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qtool.models import family_of
from qtool.runtime.linear import QuantLinear


class MergedLinears:
    """The ``parts`` as one linear; their packed tensors become views of its.

    The product of an input waits for the parts that have not taken theirs yet: an input must not be
    changed in place between its linears.
    """

    def __init__(self, parts: Sequence[QuantLinear]) -> None:
        first = parts[0]
        self.linear = QuantLinear(
            first.in_features,
            sum(part.out_features for part in parts),
            first.format,
            bias=first.bias is not None,
            permuted=first.permutation is not None,
            dtype=torch.float32 if first.bias is None else first.bias.dtype,
            device="meta",
        )
        self.columns: dict[QuantLinear, slice] = {}
        self.views: dict[QuantLinear, Tensor] = {}
        for name in [*first.stored_names, *(["bias"] if first.bias is not None else [])]:
            whole = torch.cat([part.get_buffer(name) for part in parts])
            setattr(self.linear, name, whole)
            rows = [len(part.get_buffer(name)) for part in parts]
            for part, view in zip(parts, whole.split(rows), strict=True):
                setattr(part, name, view)
        self.linear.permutation = first.permutation
        start = 0
        for part in parts:
            self.columns[part] = slice(start, start + part.out_features)
            self.views[part] = part.get_buffer("qweight")
            start += part.out_features
            part.merged = self
        #: an input, and by linear the columns that were not taken yet
        self._waiting: tuple[Tensor, dict[QuantLinear, Tensor]] | None = None

    def serves(self, part: QuantLinear, x: Tensor) -> bool:
        """Whether ``part`` still has the merged tensors (not moved, nor replaced), and ``x`` is
        there.
        """
        return part.qweight is self.views[part] and x.device == self.linear.qweight.device

    def product(self, part: QuantLinear, x: Tensor) -> Tensor:
        """The product of ``part``, ``[..., N]`` for ``x [..., K]``: a view of all parts'."""
        waiting = self._waiting
        if waiting is None or waiting[0] is not x or part not in waiting[1]:
            y = self.linear.product(x)
            waiting = x, {each: y[..., columns] for each, columns in self.columns.items()}
        y = waiting[1].pop(part)
        self._waiting = waiting if waiting[1] else None
        return y


def merge_linears(model: PreTrainedModel) -> None:
    """Merge the linears of ``model`` that read one input, wherever a kernel multiplies their packed
    rows.
    """
    for parts in _siblings(model):
        if _mergeable(parts):
            MergedLinears(parts)


def _siblings(model: PreTrainedModel) -> Iterator[list[QuantLinear]]:
    """Packed linears that read one input."""
    config = model.config.get_text_config(decoder=True)
    family = family_of(config.model_type)
    blocks: nn.Module = model.get_submodule(family.blocks)
    for number, block in enumerate(blocks.children()):
        modules = dict(block.named_modules())
        for group in family.at(config, number).groups:
            found = [modules.get(name) for name in group.linears]
            parts = [part for part in found if isinstance(part, QuantLinear)]
            if len(parts) == len(found) > 1:
                yield parts


def _mergeable(parts: Sequence[QuantLinear]) -> bool:
    """Whether the packed tensors of ``parts``, concatenated, are those of one linear."""
    first, rows = parts[0], sum(part.out_features for part in parts)
    device, k = first.get_buffer("qweight").device, first.in_features
    if any(part.format != first.format or part.in_features != k for part in parts):
        return False
    if len({part.bias is None for part in parts}) > 1 or not _same_permutation(parts):
        return False
    if not any(first.kernel(device, dtype) for dtype in (torch.bfloat16, torch.float32)):
        return False
    for name, spec in first.format.tensors(rows, k).items():
        tensors = [part.get_buffer(name) for part in parts]
        if spec.shape != (sum(map(len, tensors)), *tensors[0].shape[1:]):
            return False
    return True


def _same_permutation(parts: Sequence[QuantLinear]) -> bool:
    first = parts[0].permutation
    if first is None:
        return all(part.permutation is None for part in parts)
    return all(
        part.permutation is not None and torch.equal(part.permutation, first) for part in parts
    )
