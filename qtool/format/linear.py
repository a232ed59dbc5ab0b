"""The format of one linear: its scheme, its layout, and the tensors that follow from both.

A quantized linear ``P`` of a weight ``[N, K]`` stores ``P.qweight`` (packed codes), one tensor for
each scheme parameter (``P.s1``, ``P.s2``, ...; per-group ones in the layout's order), ``P.bias`` if
it has a bias, and ``P.permutation`` (int32 ``[K]``) if its input is gathered first. The input of a
rotated linear is then rotated as its columns were
(:mod:`qtool.schemes.arithmetic.online_hadamard`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import lcm

import torch
from torch import Tensor

from qtool import layouts, schemes
from qtool.errors import QtoolError
from qtool.layouts import Layout
from qtool.schemes import Params, Scheme
from qtool.schemes.arithmetic.online_hadamard import SPAN

#: the tensor of the packed codes, which identifies a packed linear
CODES = "qweight"
#: other tensors of linears, whose names no scheme's parameter may have
RESERVED = {"weight", "bias", "permutation"}
#: rows that every built-in layout's tile divides
SLAB_ROWS = 256


@dataclass(frozen=True)
class LinearFormat:
    """The format of one stored linear.

    Args:
        scheme: name of the scheme.
        group_size: input channels in a group; None means the whole channel.
        layout: name of the layout.
        scale_dtype: torch's name of the dtype of stored scales.
        rotated: whether the input is rotated at run time.
    """

    scheme: str
    group_size: int | None
    layout: str
    scale_dtype: str = "float32"
    rotated: bool = False

    @cached_property
    def scheme_object(self) -> Scheme:
        return schemes.get(self.scheme, self.group_size, getattr(torch, self.scale_dtype))

    @cached_property
    def layout_object(self) -> Layout:
        return layouts.get(self.layout)

    def require(self, name: str, n: int, k: int, common: int | None = None) -> None:
        """Refuse a linear ``name`` whose weight ``[n, k]`` scheme or layout cannot hold.

        Args:
            common: a common divisor of the input channels of all linears in this format; by default
                ``k``.

        Raises:
            QtoolError: names the linear, or the layout if it fits no linear of the scheme.
        """
        layout, scheme = self.layout_object, self.scheme_object
        if layout.bits != scheme.code_bits:
            raise QtoolError(
                f"layout {layout.name} holds {layout.bits}-bit codes, "
                f"{scheme.name} has {scheme.code_bits}-bit ones"
            )
        if layout.sparsity not in (None, scheme.sparsity):
            kept, of = layout.sparsity
            raise QtoolError(
                f"layout {layout.name} stores {kept} of {of} weights, {scheme.name} "
                + ("has all of them" if scheme.sparsity is None else "has others")
            )
        if self.rotated and k % SPAN:
            raise QtoolError(
                f"{name}: its inputs are rotated at run time, {SPAN} at a time, which does not "
                f"divide {k} input channels"
            )
        try:
            scheme.require_groups(k, common or k)
            if k % (inputs := scheme.activation.group_size or 1):
                raise QtoolError(
                    f"{scheme.name}: {k} input channels are not divisible by {inputs}, the group "
                    "size of its activations"
                )
            layout.require(n, k)
        except QtoolError as error:
            raise QtoolError(f"{name}: {error}") from error

    def pack(self, codes: Tensor, params: Params) -> dict[str, Tensor]:
        """The stored tensors for codes ``[N, K]`` and parameters."""
        layout, shared = self.layout_object, self.scheme_object.shared_params
        stored = layout.pack(codes)
        for name, param in params.items():
            if name in shared:
                stored[name] = param
            elif param.dim() == 2:
                stored[name] = layout.pack_group(param)
            else:
                stored[name] = layout.pack_channel(param)
        return stored

    def unpack(self, stored: Mapping[str, Tensor], n: int, k: int) -> tuple[Tensor, Params]:
        """Codes ``[n, k]`` and parameters of stored tensors. Inverse of :meth:`pack`."""
        layout, scheme, params = self.layout_object, self.scheme_object, {}
        for name, param in self.parameters(n, k).items():
            if name in scheme.shared_params:
                params[name] = stored[name]
            elif param.dim() == 2:
                params[name] = layout.unpack_group(stored[name], n)
            else:
                params[name] = layout.unpack_channel(stored[name])
        packed = {name: stored[name] for name in layout.tensors}
        return layout.unpack(packed, n, k, signed=scheme.signed), params

    def pack_all(self, weights: Sequence[tuple[Tensor, Params]]) -> list[dict[str, Tensor]]:
        """:meth:`pack` for weights of one shape, together if the layout packs by rows."""
        if len(weights) == 1 or not self._by_rows:
            return [self.pack(*weight) for weight in weights]
        codes, params = zip(*weights, strict=True)
        stored = self.pack(torch.cat(codes), self.scheme_object.stacked_params(params))
        parts = {name: t.unflatten(0, (len(weights), -1)) for name, t in stored.items()}
        return [{name: t[i] for name, t in parts.items()} for i in range(len(weights))]

    def unpack_all(
        self, stored: Sequence[Mapping[str, Tensor]], n: int, k: int
    ) -> list[tuple[Tensor, Params]]:
        """Codes ``[n, k]`` and parameters of each of ``stored``. Inverse of :meth:`pack_all`."""
        if len(stored) == 1 or not self._by_rows:
            return [self.unpack(own, n, k) for own in stored]
        whole = {name: torch.cat([own[name] for own in stored]) for name in self.tensors(n, k)}
        codes, params = self.unpack(whole, len(stored) * n, k)
        by_weight = self.scheme_object.split_params(params, len(stored))
        return list(zip(codes.unflatten(0, (-1, n)), by_weight, strict=True))

    @property
    def _by_rows(self) -> bool:
        return self.layout_object.by_rows and not self.scheme_object.shared_params

    def parameters(self, n: int, k: int) -> Params:
        """The scheme's parameters of a weight ``[n, k]``, on ``meta``."""
        return dict(_parameters(self, n, k))

    def tensors(self, n: int, k: int) -> dict[str, Tensor]:
        """The stored tensors of a weight ``[n, k]``, on ``meta``: shapes, dtypes and bytes."""
        return dict(_tensors(self, n, k))

    def nbytes(self, n: int, k: int) -> int:
        """Stored bytes of a weight ``[n, k]``."""
        shared, slab, rows = _slab_bytes(self, k)
        return shared + slab * n // rows


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two stored tensors hold the same; ``torch.equal`` refuses float8 in one storage."""
    flat = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (a, b))
    return a.shape == b.shape and torch.equal(*flat)


def forget() -> None:
    """Clear the caches of schemes and layouts by name, since one was registered again."""
    for remembered in (_parameters, _tensors, _slab_bytes):
        remembered.cache_clear()


@cache  # a mixture of experts has tens of thousands of linears of the same few shapes
def _parameters(linear_format: LinearFormat, n: int, k: int) -> Params:
    return linear_format.scheme_object.fit(torch.empty(n, k, device="meta"))


@cache
def _tensors(linear_format: LinearFormat, n: int, k: int) -> dict[str, Tensor]:
    layout, scheme = linear_format.layout_object, linear_format.scheme_object
    codes = torch.empty(n, k, dtype=scheme.code_dtype, device="meta")
    params = _parameters(linear_format, n, k)
    if taken := params.keys() & {*layout.tensors, *RESERVED}:
        raise QtoolError(f"{scheme.name}: no parameter can be called {min(taken)}")
    stored = linear_format.pack(codes, params)
    if stored.keys() != {*layout.tensors, *params}:
        raise QtoolError(
            f"layout {layout.name}: it packs {', '.join(sorted(stored.keys() - params.keys()))}, "
            f"its tensors are {', '.join(layout.tensors)}"
        )
    return stored


@cache
def _slab_bytes(linear_format: LinearFormat, k: int) -> tuple[int, int, int]:
    """Bytes shared by all rows, and bytes of a slab of rows, of a weight with ``k`` columns.

    The third number is the number of rows in the slab: SLAB_ROWS, or more if a tile needs it.

    The bytes are measured on packed zeros, since storage grows linearly with rows. torch's ``meta``
    kernels would import its compiler, which takes longer than a whole plan.
    """
    rows = lcm(SLAB_ROWS, linear_format.layout_object.tile[0])
    scheme, zeros = linear_format.scheme_object, torch.zeros(rows, k)
    params = scheme.fit(zeros)
    stored = linear_format.pack(scheme.quantize(zeros, params), params)
    shared = sum(stored[name].nbytes for name in scheme.shared_params)
    return shared, sum(t.nbytes for t in stored.values()) - shared, rows
