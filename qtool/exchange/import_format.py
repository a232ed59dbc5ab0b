"""The protocol of a foreign 4-bit format that can be imported.

A checkpoint's ``quantization_config`` gives its :class:`ImportFormat`; a config that no scheme of
qtool holds (other widths, quantized activations) is refused there, with the reason. Group sizes,
zero points and the order of input channels are data: :func:`grid_of` reads them for each linear.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.exchange.formats.affine import W4A16_GROUP_SIZES, Affine
from qtool.io.source import Checkpoint
from qtool.models.architecture import DTYPES, dtype_name
from qtool.units import group_size_text

#: the schemes of imported linears: SYMMETRIC if all zero points are 8, else ZERO_POINTS
SYMMETRIC, ZERO_POINTS = "w4a16", "w4a8-qoq"
#: a ``quantization_config``
Config = Mapping[str, Any]
#: advice for a checkpoint that cannot be imported
INSTEAD = (
    "quantize the original model, or dequantize this one to 16 bits with the tool that made it "
    "and quantize that"
)


@dataclass(frozen=True)
class ImportFormat:
    """The format of a foreign checkpoint's linears.

    Attributes:
        name: the name of the format in messages.
        weight: name of the tensor of codes; a linear that has it is quantized.
        scales: name of the tensor of scales.
        zeros: name of the tensor of zero points.
        group_index: name of the tensor with the group of each input channel; "" if there is none.
        always_zeros: every linear has the tensor of zero points.
        other: names of further tensors of a linear, which are not needed.
        words: function from ``(n, k)`` to the shape of the packed codes, eight in an int32 word.
        transposed: scales are ``[G, N]``, not ``[N, G]``.
        read: function from ``(tensors, n, k)`` to codes, scales and zero points; it is given the
            first three of the tensors above.
        read_zeros: function from ``(stored, n, groups)`` to zero points ``[n, groups]``.
    """

    name: str
    weight: str
    scales: str
    zeros: str
    group_index: str
    transposed: bool
    words: Callable[[int, int], tuple[int, ...]]
    read: Callable[[Mapping[str, Tensor], int, int], Affine]
    read_zeros: Callable[[Tensor, int, int], Tensor]
    always_zeros: bool = True
    other: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of a linear's tensors."""
        named = (self.weight, self.scales, self.zeros, self.group_index, *self.other)
        return tuple(name for name in named if name)


@dataclass(frozen=True)
class Grid:
    """The quantization grid of a linear's weight ``[n, k]``.

    Attributes:
        group_size: input channels in a group; None for the whole channel.
        scales: dtype of the scales.
        zero_points: whether any zero point is not 8.
        order: the input channels sorted by group, ``[k]``; None if they are in this order already.
    """

    n: int
    k: int
    group_size: int | None
    scales: str
    zero_points: bool
    order: Tensor | None


def require_setting(config: Config, key: str, wanted: int | str, what: str, why: str) -> None:
    """Refuse a config whose ``key`` is not ``wanted``.

    Raises:
        QtoolError: names the format, the key and both values.
    """
    if config.get(key) != wanted:
        raise QtoolError(
            f"{what} with {key}={config.get(key)!r} cannot be imported, only {key}={wanted!r}: "
            f"{why}"
        )


def grid_of(source: Checkpoint, foreign: ImportFormat, name: str, shape: tuple[int, int]) -> Grid:
    """The grid of a linear, from its scales, zero points and group index.

    Raises:
        QtoolError: tensors of other shapes than the model's, or a grid that no scheme has.
    """
    n, k = shape
    codes, words = source.entry(f"{name}.{foreign.weight}"), foreign.words(n, k)
    if codes.dtype != torch.int32 or codes.shape != words:
        raise QtoolError(
            f"{name}.{foreign.weight}: {codes.dtype} {list(codes.shape)} found; "
            f"int32 words {list(words)} of {n} x {k} codes expected; {INSTEAD}"
        )
    scales = source.entry(f"{name}.{foreign.scales}")
    rows, columns = scales.shape if len(scales.shape) == 2 else (0, 0)
    groups, outputs = (rows, columns) if foreign.transposed else (columns, rows)
    if outputs != n or not groups or k % groups:
        raise QtoolError(
            f"{name}.{foreign.scales}: shape {list(scales.shape)} is not that of a weight "
            f"[{n}, {k}]; {INSTEAD}"
        )
    if scales.dtype not in DTYPES.values():
        raise QtoolError(
            f"{name}.{foreign.scales}: {dtype_name(scales.dtype)} found, one of "
            f"{', '.join(DTYPES)} expected; {INSTEAD}"
        )
    size = None if groups == 1 else k // groups
    if size not in W4A16_GROUP_SIZES:
        listed = ", ".join(map(group_size_text, W4A16_GROUP_SIZES))
        raise QtoolError(f"{name}: group size {size} is not one of w4a16's: {listed}; {INSTEAD}")
    order = None
    if foreign.group_index and f"{name}.{foreign.group_index}" in source:
        order = _order(name, source.read(f"{name}.{foreign.group_index}"), k, groups)
    bad = 0
    if foreign.always_zeros or f"{name}.{foreign.zeros}" in source:
        stored = source.entry(f"{name}.{foreign.zeros}")
        if stored.dtype != torch.int32 or stored.nbytes != n * groups // 2:
            raise QtoolError(
                f"{name}.{foreign.zeros}: {dtype_name(stored.dtype)} {list(stored.shape)} found, "
                f"int32 words of {n} x {groups} zero points expected; {INSTEAD}"
            )
        zero = foreign.read_zeros(source.read(f"{name}.{foreign.zeros}"), n, groups)
        bad = int((zero != 8).sum())
    if bad and size is not None:
        raise QtoolError(
            f"{name}: {bad} of {n * groups} zero points are not 8, in groups of {size}: "
            f"{SYMMETRIC} has no zero points and {ZERO_POINTS} has one a channel, so that only "
            f"rounding anew could bring it in; {INSTEAD}"
        )
    return Grid(n, k, size, dtype_name(scales.dtype), bad > 0, order)


def _order(name: str, group_of: Tensor, k: int, groups: int) -> Tensor | None:
    """The input channels sorted by group, int64 ``[k]``; None if they are in this order already.

    Raises:
        QtoolError: ``group_of`` is not an index of ``groups`` groups of equal size.
    """
    index = group_of.long()
    legal = index.shape == (k,) and bool(((index >= 0) & (index < groups)).all())
    if not legal or bool((index.bincount(minlength=groups) != k // groups).any()):
        raise QtoolError(
            f"{name}: its group index does not give each of {groups} groups {k // groups} of {k} "
            f"input channels; {INSTEAD}"
        )
    order = index.argsort(stable=True)
    return None if bool((index[1:] >= index[:-1]).all()) else order
