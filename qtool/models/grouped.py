"""Linears of many experts as one product over tokens that are sorted by expert.

    y[rows of e] = x[rows of e] W_e^T + b_e        for each expert e

On a GPU one grouped matmul does it where the weights are 16-bit parts of one tensor; elsewhere it
is a product for each expert's rows.

Legend: E experts, P pairs of a token and an expert it goes to, N output channels, K input channels.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qtool.schemes.arithmetic.activation import UNQUANTIZED, Activation
from qtool.schemes.arithmetic.online_hadamard import rotate_fast, rotate_input

#: bytes that the rows of a grouped matmul's operands must be multiples of
ALIGNMENT = 16


def segments(x: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """``x [P, K]`` as the rows of each expert, of which there are ``counts [E]``."""
    return list(x.split(list(counts)))


def grouped_linear(linears: Sequence[Any], x: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """The outputs ``[P, N]`` of ``linears [E]``.

    A linear that is neither torch's nor says what its input's quantizer is, or that somebody looks
    at, is called with its rows.

    Args:
        x: ``[P, K]``.
        parts: its :func:`segments`; linears that share an input are given the same ones.
    """
    if (shared := shared_reading(linears)) is None:
        pairs = zip(linears, parts, strict=True)
        found = [linear(part) for linear, part in pairs if len(part)]
        return torch.cat(found) if found else x.new_empty(0, linears[0].out_features)
    activation, rotated = shared
    if rotated or activation is not UNQUANTIZED:
        x = activation.fake(rotate_fast(x) if rotated else x)
        parts = segments(x, [len(part) for part in parts])
    if runs_grouped(x, linears[0].weight):
        return _grouped(linears, x, [len(part) for part in parts])
    triples = zip(linears, parts, strict=True)
    found = [nn.functional.linear(part, own.weight, own.bias) for own, part in triples if len(part)]
    return torch.cat(found) if found else x.new_empty(0, len(linears[0].weight))


def shared_reading(linears: Sequence[Any]) -> tuple[Activation, bool] | None:
    """What quantizes the input of each of ``linears``, and whether it is rotated before.

    None if they are not alike or observed.
    """
    found = {_reading(linear) for linear in linears}
    return found.pop() if len(found) == 1 else None


def _reading(linear: Any) -> tuple[Activation, bool] | None:
    hooks = [*linear._forward_pre_hooks.values()]
    if linear._forward_hooks or hooks not in ([], [rotate_input]):
        return None
    if type(linear) is nn.Linear:
        return UNQUANTIZED, bool(hooks)
    activation = getattr(linear, "activation", None)
    return None if hooks or activation is None else (activation, linear.rotated)


def as_read(linears: Sequence[Any], x: Tensor, counts: Sequence[int]) -> Tensor:
    """``x [P, K]``, of which ``linears [E]`` have ``counts [E]`` rows, as their hooks rotate it."""
    rotated = torch.tensor([rotate_input in one._forward_pre_hooks.values() for one in linears])
    if not rotated.any():
        return x
    rows = rotated.repeat_interleave(torch.tensor(counts)).to(x.device, non_blocking=True)
    return torch.where(rows[:, None], rotate_fast(x), x)


def runs_grouped(x: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies ``x [P, K]`` and weights like ``[N, K]`` in one launch.

    Not where operations are recorded or replaced one by one.
    """
    rows = [size * weight.itemsize for size in weight.shape]
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and x.dtype == weight.dtype == torch.bfloat16
        and not any(size % ALIGNMENT for size in rows)
        and not is_in_torch_dispatch_mode()
        and not (torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad))
    )


def _grouped(linears: Sequence[Any], x: Tensor, counts: Sequence[int]) -> Tensor:
    number = torch.tensor(counts, device=x.device)
    ends = number.cumsum(0).to(torch.int32)
    y = nn.functional.grouped_mm(x, stacked(linears).mT, offs=ends)
    if linears[0].bias is not None:
        bias = torch.stack([linear.bias for linear in linears])
        y = y + bias.repeat_interleave(number, 0, output_size=len(x))
    return y


def stacked(linears: Sequence[Any]) -> Tensor:
    """The weights as one tensor ``[E, N, K]``, of which each one is a part from then on."""
    weights = [linear.weight.detach() for linear in linears]
    if (stack := _as_one(weights)) is None:
        stack = torch.stack(weights)
        for linear, own in zip(linears, stack, strict=True):
            linear.weight.data = own
    return stack


def _as_one(weights: Sequence[Tensor]) -> Tensor | None:
    """The tensor whose parts ``weights`` are, in its order; None if there is none of use."""
    first = weights[0]
    n, k = first.stride()
    steps = {b.storage_offset() - a.storage_offset() for a, b in pairwise(weights)}
    alike = {(w.untyped_storage().data_ptr(), w.stride()) for w in weights}
    if len(steps) != 1 or len(alike) != 1 or (step := steps.pop()) <= 0 or 1 not in (n, k):
        return None
    places = (first.data_ptr(), step * first.itemsize, max(n, k) * first.itemsize)
    if any(place % ALIGNMENT for place in places):
        return None
    return first.as_strided((len(weights), *first.shape), (step, n, k))
