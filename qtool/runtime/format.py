"""The native checkpoint format: which scheme and layout each linear has, and what tensors it stores.

This is the one statement behind ``plan`` (sizes), the writer, the loader, ``verify`` and the exports.
It is plain data with no model in it; ``config.json`` holds it as ``quantization_config``.

A quantized linear ``P`` of a weight ``[N, K]`` stores ``P.qweight`` (packed codes), one tensor a
scheme parameter (``P.s1``, ``P.s2``, ...; per-group ones in the layout's order), ``P.bias`` if it has
one, and ``P.permutation`` (int32 ``[K]``) if its input is gathered first.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from qtool import layouts, schemes
from qtool.errors import QtoolError
from qtool.layouts import Layout
from qtool.schemes import Params, Scheme

FORMAT_VERSION = 1
QUANT_METHOD = "qtool"
#: rows that every layout's tile divides
SLAB_ROWS = 256


@dataclass(frozen=True)
class LinearFormat:
    """How one linear is stored.

    Args:
        scheme, group_size, layout: their names; ``group_size`` None is the whole channel.
        scale_dtype: the dtype of stored scales, as torch names it.
    """

    scheme: str
    group_size: int | None
    layout: str
    scale_dtype: str = "float32"

    @cached_property
    def scheme_object(self) -> Scheme:
        return schemes.get(self.scheme, self.group_size, getattr(torch, self.scale_dtype))

    @cached_property
    def layout_object(self) -> Layout:
        return layouts.get(self.layout)

    def require(self, name: str, n: int, k: int) -> None:
        """Raise QtoolError, naming the linear, unless scheme and layout can hold a weight ``[n, k]``."""
        layout, scheme = self.layout_object, self.scheme_object
        if layout.bits != scheme.code_bits:
            raise QtoolError(
                f"layout {layout.name} holds {layout.bits}-bit codes, {scheme.name} has {scheme.code_bits}-bit ones"
            )
        if layout.name == "marlin-24" and scheme.sparsity is None:
            raise QtoolError(f"layout {layout.name} stores two of four weights, {scheme.name} has all of them")
        try:
            scheme.groups(torch.empty(n, k, device="meta"))
            layout.require(n, k)
        except QtoolError as error:
            raise QtoolError(f"{name}: {error}") from error

    def pack(self, codes: Tensor, params: Params) -> dict[str, Tensor]:
        """Stored tensors of codes ``[N, K]`` and parameters."""
        layout, shared = self.layout_object, self.scheme_object.shared_params
        stored = layout.pack(codes)
        for name, param in params.items():
            if name in shared:
                stored[name] = param
            else:
                stored[name] = layout.pack_group(param) if param.dim() == 2 else layout.pack_channel(param)
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

    def parameters(self, n: int, k: int) -> Params:
        """The scheme's parameters of a weight ``[n, k]``, on ``meta``."""
        return dict(_parameters(self, n, k))

    def tensors(self, n: int, k: int) -> dict[str, Tensor]:
        """The stored tensors of a weight ``[n, k]``, on ``meta``: shapes, dtypes and bytes."""
        return dict(_tensors(self, n, k))

    def nbytes(self, n: int, k: int) -> int:
        """Stored bytes of a weight ``[n, k]``."""
        shared, slab = _slab_bytes(self, k)
        return shared + slab * n // SLAB_ROWS


@cache  # a mixture of experts has tens of thousands of linears of the same few shapes
def _parameters(linear_format: LinearFormat, n: int, k: int) -> Params:
    return linear_format.scheme_object.fit(torch.empty(n, k, device="meta"))


@cache
def _tensors(linear_format: LinearFormat, n: int, k: int) -> dict[str, Tensor]:
    codes = torch.empty(n, k, dtype=linear_format.scheme_object.code_dtype, device="meta")
    return linear_format.pack(codes, _parameters(linear_format, n, k))


@cache
def _slab_bytes(linear_format: LinearFormat, k: int) -> tuple[int, int]:
    """Bytes shared by all rows, and bytes of SLAB_ROWS rows, of a weight with ``k`` columns.

    Measured on zeros: storage grows linearly with rows, and torch's ``meta`` kernels import its
    compiler, which takes longer than a whole plan.
    """
    scheme, zeros = linear_format.scheme_object, torch.zeros(SLAB_ROWS, k)
    params = scheme.fit(zeros)
    stored = linear_format.pack(scheme.quantize(zeros, params), params)
    shared = sum(stored[name].nbytes for name in scheme.shared_params)
    return shared, sum(t.nbytes for t in stored.values()) - shared


@dataclass(frozen=True)
class Rule:
    """Linears whose full name matches the regex ``match`` are stored as ``format``; None leaves 16 bit."""

    match: str
    format: LinearFormat | None

    def __post_init__(self) -> None:
        try:
            re.compile(self.match)
        except re.error as error:
            raise QtoolError(f"layer pattern {self.match!r} is not a regular expression: {error}") from error


@dataclass(frozen=True)
class CheckpointFormat:
    """The format of a whole checkpoint: the first rule that matches a linear's name holds.

    Args:
        scheme: the name the user asked for (a recipe's; its rules may mix schemes).
        permuted: names within a block of the linears that store an input permutation.
        kv: the KV-cache quantizer, or None.
    """

    scheme: str
    rules: tuple[Rule, ...]
    permuted: tuple[str, ...] = ()
    kv: str | None = None
    version: int = FORMAT_VERSION

    def of(self, name: str) -> LinearFormat | None:
        """The format of the linear ``name`` (full module path); None if it stays as it is."""
        return next((rule.format for rule in self.rules if re.search(rule.match, name)), None)

    def is_permuted(self, name: str) -> bool:
        return any(name.endswith("." + suffix) for suffix in self.permuted)

    def to_dict(self) -> dict[str, Any]:
        """The ``quantization_config`` of config.json."""
        rules = [{"match": r.match} | (asdict(r.format) if r.format else {"scheme": None}) for r in self.rules]
        return {
            "quant_method": QUANT_METHOD,
            "format_version": self.version,
            "scheme": self.scheme,
            "rules": rules,
            "permuted": list(self.permuted),
            "kv": self.kv,
        }

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> "CheckpointFormat":
        """Read ``quantization_config``.

        Raises:
            QtoolError: not ours, a newer version, or a field that is missing or of the wrong kind.
        """
        if config.get("quant_method") != QUANT_METHOD:
            raise QtoolError(
                f"the model is quantized by {config.get('quant_method')!r}, not by qtool; `qtool import` makes "
                "a symmetric 4-bit one native, and an export is made from the native checkpoint"
            )
        if config.get("format_version") != FORMAT_VERSION:
            found = config.get("format_version")
            raise QtoolError(f"format version {found} cannot be read; this qtool reads version {FORMAT_VERSION}")
        try:
            rules = tuple(_rule(dict(rule)) for rule in config["rules"])
            return cls(config["scheme"], rules, tuple(config.get("permuted", ())), config.get("kv"))
        except (KeyError, TypeError, ValueError) as error:
            raise QtoolError(f"quantization_config is damaged: {error!r}") from error


def _rule(rule: dict[str, Any]) -> Rule:
    match = rule.pop("match")
    return Rule(match, LinearFormat(**rule) if rule["scheme"] else None)
