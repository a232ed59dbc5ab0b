"""What a quantization scheme is: a small pure object over tensors.

Legend: N output channels, K input channels, M tokens, g group size, G = K / g groups.

A scheme turns a weight ``[N, K]`` into integer *codes* and *parameters* (scales, zero points) and
says what they mean. It works on any device, on ``meta`` too, so that ``qtool plan`` gets every
stored shape and byte from the same code that quantizes.

Every scheme of the five papers is, per group, an affine grid ``value = step * code + offset`` over
a range of legal codes. GPTQ, clipping and distillation see only that :class:`Grid`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from qtool.errors import CheckFailed, QtoolError
from qtool.schemes.activation import Activation

Params = dict[str, Tensor]
Clip = Tensor | float


@dataclass(frozen=True)
class Grid:
    """The representable values of each group: ``step * code + offset``, ``low <= code <= high``.

    All four are ``[N, G]``; ``step`` and ``offset`` float32, ``low`` and ``high`` int32. Any code
    inside the bounds satisfies the scheme's overflow invariants.
    """

    step: Tensor
    offset: Tensor
    low: Tensor
    high: Tensor

    def nearest(self, weight: Tensor) -> Tensor:
        """Codes (float32, integral) of ``weight [N, G, g]`` nearest to it on the grid."""
        codes = torch.round((weight - self.offset[..., None]) / self.step[..., None])
        return codes.clamp(self.low[..., None], self.high[..., None])

    def value(self, codes: Tensor) -> Tensor:
        """Values (float32) of ``codes [N, G, g]``."""
        return codes * self.step[..., None] + self.offset[..., None]


class Scheme(ABC):
    """One quantization scheme at one group size.

    Args:
        group_size: input channels that share one group of parameters; ``None`` means all K
            (one group per output channel).
        scale_dtype: dtype the scales are stored in; codes are computed with the stored value.
    """

    name: ClassVar[str]
    code_bits: ClassVar[int]
    signed: ClassVar[bool]
    group_sizes: ClassVar[tuple[int | None, ...]]
    activation: Activation
    #: parameters whose first dimension is not N (shared by all output channels)
    shared_params: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, group_size: int | None, scale_dtype: torch.dtype = torch.float32) -> None:
        if group_size not in self.group_sizes:
            accepted = ", ".join("channel" if g is None else str(g) for g in self.group_sizes)
            raise QtoolError(f"{self.name}: group size {group_size} is not supported; accepted: {accepted}")
        self.group_size = group_size
        self.scale_dtype = scale_dtype

    @property
    def code_dtype(self) -> torch.dtype:
        """dtype that holds one code a byte."""
        return torch.int8 if self.signed else torch.uint8

    def groups(self, weight: Tensor) -> Tensor:
        """``weight [N, K]`` as ``[N, G, g]``.

        Raises:
            QtoolError: if K is not a multiple of the group size.
        """
        n, k = weight.shape
        size = self.group_size or k
        if k % size:
            raise QtoolError(f"{self.name}: {k} input channels are not divisible by group size {size}")
        return weight.reshape(n, k // size, size)

    @abstractmethod
    def fit(self, weight: Tensor, *, clip: Clip = 1.0, group_clip: Clip = 1.0) -> Params:
        """Parameters for ``weight [N, K]``.

        Args:
            clip: shrinks the range of the output channel (level 1), a number or ``[N]``.
            group_clip: shrinks the range of each group (level 2, or the only one), a number or
                ``[N, G]``. A scheme with one group per channel uses ``clip * group_clip``.

        Raises:
            QtoolError: for NaN or Inf weights, or K not divisible by the group size.
        """

    @abstractmethod
    def grid(self, params: Params) -> Grid:
        """The affine grid that ``params`` span."""

    @abstractmethod
    def quantize(self, weight: Tensor, params: Params) -> Tensor:
        """Round-to-nearest codes ``[N, K]`` of ``weight [N, K]``, as the paper rounds."""

    @abstractmethod
    def dequantize(self, codes: Tensor, params: Params) -> Tensor:
        """The exact weight ``[N, K]`` in float32 that the integers stand for."""

    @abstractmethod
    def matmul(self, x: Tensor, codes: Tensor, params: Params) -> Tensor:
        """``Y [M, N]`` float32 for ``x [M, K]`` by the scheme's own arithmetic: sums exact in int32."""

    @abstractmethod
    def check(self, codes: Tensor, params: Params) -> None:
        """Prove the scheme's overflow and range invariants on these tensors.

        Raises:
            CheckFailed: naming the invariant and the first place it breaks.
        """

    def fake_activation(self, x: Tensor, params: Params) -> Tensor:
        """``x [..., K]`` quantized and dequantized as :meth:`matmul` would see it, same dtype."""
        return self.activation.fake(x)


def require_finite(weight: Tensor, name: str) -> None:
    """Refuse NaN and Inf (nothing to look at on ``meta``)."""
    if not weight.is_meta and not torch.isfinite(weight).all():
        bad = int((~torch.isfinite(weight)).sum())
        raise QtoolError(f"{name}: the weight holds {bad} NaN or Inf values; only finite weights can be quantized")


def stored_scale(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """``scale`` as the checkpoint stores it; never zero, so that dividing by it is safe."""
    return scale.clamp(torch.finfo(dtype).tiny, torch.finfo(dtype).max).to(dtype)


def require(holds: Tensor, invariant: str) -> None:
    """Raise :class:`CheckFailed` unless ``holds`` is true everywhere."""
    if not bool(holds.all()):
        where = tuple(int(i) for i in (~holds).nonzero()[0])
        raise CheckFailed(f"invariant {invariant} broken at {where} and {int((~holds).sum())} places in all")


def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a [M, K] @ b [N, K]^T`` of int8 operands, exact in int32.

    On CPU this is torch's int8 GEMM. On CUDA, where ``_int_mm`` wants M > 16 and multiples of 8,
    float64 is exact for any K below 2**38.
    """
    if a.device.type == "cpu":
        return torch._int_mm(a.contiguous(), b.t())
    return (a.double() @ b.double().t()).to(torch.int32)


def describe_params(params: Mapping[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each parameter: what ``plan`` prints and the writer declares."""
    return {name: (tuple(t.shape), t.dtype) for name, t in params.items()}
