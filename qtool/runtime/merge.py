"""Linears that read one input, multiplied as one: q, k and v, or gate and up.

If packed tensors are stored by rows of output channels, the concatenated tensors of several linears
equal the packed tensors of the concatenated weight. So the input is quantized once, and one GEMM
has enough rows to fill the GPU. The linears remain the model's modules. Their tensors become views
of the merged ones, hence names, state dict and single products are as before. In a forward the
first linear that sees an input computes the product of all, and each takes its columns.

Within :func:`norms_taken_along` an RMSNorm that only merged linears read passes its input on, and
their kernel normalizes while it quantizes.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from qtool.models import family_of
from qtool.runtime.fused_norms import is_rms_norm
from qtool.runtime.linear import QuantLinear

_NORMS_TAKEN: ContextVar[bool] = ContextVar("_NORMS_TAKEN", default=False)


@contextmanager
def norms_taken_along() -> Iterator[None]:
    """Let merged linears compute a plain RMSNorm of their input themselves while open."""
    before = _NORMS_TAKEN.set(True)
    try:
        yield
    finally:
        _NORMS_TAKEN.reset(before)


class MergedLinears:
    """The linears ``parts`` as one; their packed tensors become views of the merged tensors.

    The product of an input is kept until every part has taken its columns, so an input must not be
    changed in place between its linears.
    """

    def __init__(self, parts: Sequence[QuantLinear]) -> None:
        self.linear = _merged(parts)
        self.columns: dict[QuantLinear, slice] = {}
        self.views: dict[QuantLinear, Tensor] = {}
        start = 0
        for part in parts:
            self.columns[part] = slice(start, start + part.out_features)
            self.views[part] = part.get_buffer("qweight")
            start += part.out_features
            part.merged = self
        #: the merged linear with the norm of its input, if :meth:`take_norm` gave it one
        self.normed: QuantLinear | None = None
        self.norm_forward: Callable[[Tensor], Tensor] | None = None
        self.places: list[tuple[nn.Module, str, nn.Module]] = []
        #: an input, and the columns that were not taken yet, by linear
        self._waiting: tuple[Tensor, dict[QuantLinear, Tensor]] | None = None

    def serves(self, part: QuantLinear, x: Tensor) -> bool:
        """Whether ``part`` still has the merged tensors, on the device of ``x``."""
        return part.qweight is self.views[part] and x.device == self.linear.qweight.device

    def product(self, part: QuantLinear, x: Tensor) -> Tensor:
        """The product of ``part``, ``[..., N]`` for ``x [..., K]``: a view of all parts'."""
        waiting = self._waiting
        if waiting is None or waiting[0] is not x or part not in waiting[1]:
            linear = self.normed if self.takes_norm(x) else self.linear
            assert linear is not None
            y = linear.product(x)
            waiting = x, {each: y[..., columns] for each, columns in self.columns.items()}
        y = waiting[1].pop(part)
        self._waiting = waiting if waiting[1] else None
        return y

    def take_norm(self, block: nn.Module, source: str, names: Sequence[str]) -> None:
        """Let the kernel compute the RMSNorm ``source`` of ``block``, read by linears ``names``."""
        norm: Any = block.get_submodule(source)
        self.normed = copy(self.linear)  # with the same tensors
        self.normed.norm = norm.weight.detach(), norm.variance_epsilon
        for name in (source, *names):
            parent, _, attribute = name.rpartition(".")
            holder = block.get_submodule(parent)
            self.places.append((holder, attribute, holder.get_submodule(attribute)))
        self.norm_forward = norm.forward = partial(_norm_unless_taken, self, norm.forward)

    def takes_norm(self, x: Tensor) -> bool:
        """Whether the norm of ``x`` is computed with the product.

        It is if no module of the norm or the linears was replaced.
        """
        return (
            not torch.compiler.is_compiling()
            and _NORMS_TAKEN.get()
            and self.normed is not None
            and self.normed.norm is not None
            and self.normed.norm[0].dtype == x.dtype
            and vars(self.places[0][2]).get("forward") is self.norm_forward
            and all(holder._modules.get(name) is module for holder, name, module in self.places)
            and all(part.merged is self and self.serves(part, x) for part in self.columns)
        )


def _merged(parts: Sequence[QuantLinear]) -> QuantLinear:
    """The linear with the concatenated tensors of ``parts``, whose own become views of them."""
    first = parts[0]
    linear = QuantLinear(
        first.in_features,
        sum(part.out_features for part in parts),
        first.format,
        bias=first.bias is not None,
        permuted=first.permutation is not None,
        dtype=torch.float32 if first.bias is None else first.bias.dtype,
        device="meta",
    )
    for name in [*first.stored_names, *(["bias"] if first.bias is not None else [])]:
        whole = torch.cat([part.get_buffer(name) for part in parts])
        setattr(linear, name, whole)
        rows = [len(part.get_buffer(name)) for part in parts]
        for part, view in zip(parts, whole.split(rows), strict=True):
            setattr(part, name, view)
    linear.permutation = first.permutation
    return linear


def _norm_unless_taken(
    merged: MergedLinears, forward: Callable[[Tensor], Tensor], x: Tensor
) -> Tensor:
    return x if merged.takes_norm(x) else forward(x)


def merge_linears(model: PreTrainedModel) -> None:
    """Merge the linears of ``model`` that read one input, if a kernel takes the packed rows."""
    config = model.config.get_text_config(decoder=True)
    family = family_of(model.config)
    for number, block in enumerate(model.get_submodule(family.blocks).children()):
        modules, groups = dict(block.named_modules()), family.at(config, number).groups
        stacks = [name for name, module in modules.items() if getattr(module, "grouped", None)]
        sources = [group.source for group in groups] + list(family.readers)
        for group in groups:
            found = [modules.get(name) for name in group.linears]
            parts = [part for part in found if isinstance(part, QuantLinear)]
            stacked = group.linears[0].startswith(tuple(f"{name}." for name in stacks))
            if len(parts) == len(found) > 1 and not stacked and _mergeable(parts):
                merged = MergedLinears(parts)
                alone = group.reads_residual and sources.count(group.source) == 1
                if alone and _is_plain_norm(modules[group.source], parts[0]):
                    merged.take_norm(block, group.source, group.linears)


def _is_plain_norm(norm: nn.Module, linear: QuantLinear) -> bool:
    """Whether ``norm`` is ``x / rms(x) * weight``, as the kernels that quantize compute it."""
    kernel = linear.bfloat16_kernel()
    return is_rms_norm(norm) and kernel is not None and kernel.prepare is not None


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
