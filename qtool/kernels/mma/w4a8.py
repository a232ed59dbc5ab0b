"""``qtool::w4a8_mma_gemm``: W4A8 on Ampere and Ada, from the compute-aware layout.

The arithmetic is that of :mod:`qtool.kernels.hopper.w4a8`, with int32 sums by
``mma.sync.m16n8k32``. Level 2 takes an IMAD and an XOR for four weights, both for LiquidQuant
(LiquidGEMM eq. 12) and for QoQ's subtraction after multiplication (QServe 4.2.2).

Shapes: x int8 ``[M, K]``, sx float32 ``[M]``, qweight int8 ``[N, K/2]`` (compute-aware), level-2
parameters uint8 ``[K/g, N]`` in the layout's order, s1 ``[N]``, zero uint8 ``[N]``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtool import schemes
from qtool.errors import QtoolError
from qtool.kernels.build import Build
from qtool.kernels.checks import Expected, require_tensors
from qtool.kernels.dtypes import FLOATS
from qtool.kernels.hopper.w4a8 import MOST_CHANNELS, SCHEMES, channel_sums, require_scheme
from qtool.kernels.mma import gemm as mma
from qtool.kernels.mma.gemm import MmaOperand, MmaWeight
from qtool.kernels.op import operator
from qtool.layouts.compute_aware import COMPUTE_AWARE
from qtool.schemes.arithmetic.products import int_matmul, scaled


def operand(scheme: str, group_size: int | None) -> MmaOperand:
    """The operand that the kernel of a scheme is compiled with."""
    level2 = 0 if group_size is None else 2 * (128 // group_size)
    return MmaOperand(
        "mma/mma_w4a8_gemm",
        (("SCHEME", SCHEMES[scheme]), ("GROUP", group_size or 128)),
        64 + level2,
        128,
    )


def builds() -> Iterator[Build]:
    """Each scheme, QoQ's groups with every tile."""
    for scheme, group in (
        ("w4a8-qoq-g128", 128),
        ("w4a8-qoq", None),
        ("w4a8-lqq", 64),
        ("w4a8-lqq", 32),
    ):
        name, every = f"mma {scheme} g{group}", scheme == "w4a8-qoq-g128"
        yield from mma.builds(
            name, operand(scheme, group), "IMMA.16832.S8.S8", s4=False, every=every
        )


class W4A8MmaGemm(NamedTuple):
    """``Y [M, N]`` of ``out_dtype`` for quantized tokens and a packed weight.

    ``s2``, ``offset`` and ``zero`` are the level-2 parameters as the compute-aware layout stores
    them.

    Args:
        x: codes of the tokens, int8 ``[M, K]``.
        sx: scales of the tokens, float32 ``[M]``.
        qweight: codes as the compute-aware layout stores them.
        s1: scale per output channel ``[N]``, float32, float16 or bfloat16.
        token_sum: ``sum_k x[m, k]``, int32 ``[M]``, which QoQ per channel multiplies by its zero
            points ``[N]``.
        bias: ``[N]``, float32, float16 or bfloat16.
        scheme: ``w4a8-lqq``, ``w4a8-qoq-g128`` or ``w4a8-qoq``.
        group_size: 32, 64 or 128; ``None`` for ``w4a8-qoq``.
        out_dtype: bfloat16, float16, float32, or int32 for the bare sums.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device, scheme or GPU; one sentence.
    """

    x: Tensor
    sx: Tensor
    qweight: Tensor
    s1: Tensor
    s2: Tensor | None
    offset: Tensor | None
    zero: Tensor | None
    token_sum: Tensor
    bias: Tensor | None
    scheme: str
    group_size: int | None
    out_dtype: torch.dtype

    def require(self) -> None:
        op, scheme, group_size = "w4a8_mma_gemm", self.scheme, self.group_size
        require_scheme(op, scheme, group_size, self.out_dtype)
        if self.x.dim() != 2 or self.qweight.dim() != 2:
            raise QtoolError(
                f"{op}: x is {self.x.dim()}-D and qweight {self.qweight.dim()}-D; "
                "expected [M, K] and [N, K/2]"
            )
        (m, k), n = self.x.shape, len(self.qweight)
        if k > MOST_CHANNELS:
            raise QtoolError(
                f"{op}: K = {k}; the int32 sums are exact up to {MOST_CHANNELS} input channels"
            )
        if n % 32 or k % max(32, group_size or 0):
            raise QtoolError(
                f"{op}: N = {n} and K = {k} must be multiples of 32 and {max(32, group_size or 0)}"
            )
        level2 = None if group_size is None else (k // group_size, n)
        zero = {"w4a8-lqq": None, "w4a8-qoq-g128": level2, "w4a8-qoq": (n,)}[scheme]
        expected: dict[str, Expected] = {
            "x": (self.x, (m, k), (torch.int8,)),
            "sx": (self.sx, (m,), (torch.float32,)),
            "qweight": (self.qweight, (n, k // 2), (torch.int8,)),
            "s1": (self.s1, (n,), FLOATS),
            "s2": (self.s2, level2, (torch.uint8,)),
            "offset": (self.offset, level2 if scheme == "w4a8-lqq" else None, (torch.uint8,)),
            "zero": (self.zero, zero, (torch.uint8,)),
            "token_sum": (self.token_sum, (m,), (torch.int32,)),
            "bias": (self.bias, None if self.bias is None else (n,), FLOATS),
        }
        require_tensors(op, self.x.device, expected)

    def empty(self) -> Tensor:
        return self.x.new_empty((self.x.shape[0], len(self.qweight)), dtype=self.out_dtype)

    def reference(self) -> Tensor:
        x, n = self.x, len(self.qweight)
        codes = COMPUTE_AWARE.unpack({"qweight": self.qweight}, n, x.shape[1], signed=False)
        groups = {"s2": self.s2, "offset": self.offset, "zero": self.zero}
        if self.scheme == "w4a8-qoq":
            sums = channel_sums(x, codes, self.zero, self.token_sum)
        else:
            params = {"s1": self.s1} | {
                name: COMPUTE_AWARE.unpack_group(t, n)
                for name, t in groups.items()
                if t is not None
            }
            scheme: Any = schemes.get(self.scheme, self.group_size)
            sums = int_matmul(x, scheme.level2(codes, params))
        if self.out_dtype == torch.int32:
            return sums
        return scaled(sums, self.sx[:, None], self.s1, self.bias).to(self.out_dtype)

    def launch(self, out: Tensor) -> None:
        if len(out):
            weight = packed_weight(
                self.scheme, self.qweight, self.s1, self.s2, self.offset, self.zero
            )
            kernel, k = operand(self.scheme, self.group_size), self.x.shape[1]
            given = (kernel, self.x, self.sx, weight, out, k)
            mma.run(*given, token_sum=self.token_sum, bias=self.bias)


w4a8_mma_gemm = operator("w4a8_mma_gemm", W4A8MmaGemm)


def packed_weight(
    scheme: str,
    qweight: Tensor,
    s1: Tensor,
    s2: Tensor | None,
    offset: Tensor | None,
    zero: Tensor | None,
) -> MmaWeight:
    """The op's tensors as the kernel takes them, unchecked."""
    if scheme == "w4a8-qoq":
        return MmaWeight(qweight, s1, zero1=zero)
    return MmaWeight(qweight, s1, scale2=s2, offset2=offset if scheme == "w4a8-lqq" else zero)
