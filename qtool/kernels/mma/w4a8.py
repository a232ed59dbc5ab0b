"""``qtool::w4a8_mma_gemm``: W4A8 on Ampere and Ada, from the compute-aware layout.

The arithmetic is that of :mod:`qtool.kernels.hopper.w4a8`, with int32 sums by
``mma.sync.m16n8k32``. Level 2 takes an IMAD and an XOR for four weights, both for LiquidQuant
(LiquidGEMM eq. 12) and for QoQ's subtraction after multiplication (QServe 4.2.2).

Shapes: x int8 ``[M, K]``, sx float32 ``[M]``, qweight int8 ``[N, K/2]`` (compute-aware), level-2
parameters uint8 ``[K/g, N]`` in the layout's order, s1 ``[N]``, zero uint8 ``[N]``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import Build
from qtool.kernels.hopper.w4a8 import SCHEMES, W4A8Gemm, beside_s1, require_scheme
from qtool.kernels.mma import gemm as mma
from qtool.kernels.mma.gemm import MmaOperand, MmaWeight
from qtool.kernels.op import operator
from qtool.layouts.compute_aware import COMPUTE_AWARE


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
        name, all_tiles = f"mma {scheme} g{group}", scheme == "w4a8-qoq-g128"
        yield from mma.builds(
            name, operand(scheme, group), "IMMA.16832.S8.S8", s4=False, all_tiles=all_tiles
        )


class W4A8MmaGemm(W4A8Gemm):
    """``Y [M, N]`` of ``out_dtype`` for quantized tokens and a packed weight.

    The arguments are those of :func:`~qtool.kernels.hopper.w4a8.w4a8_gemm`; ``qweight``, ``s2``,
    ``offset`` and ``zero`` are as the compute-aware layout stores them.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device, scheme or GPU; one sentence.
    """

    def require(self, op: str = "w4a8_mma_gemm") -> None:
        group_size = self.group_size
        require_scheme(op, self.scheme, group_size, self.out_dtype)
        if self.x.dim() != 2 or self.qweight.dim() != 2:
            raise QtoolError(
                f"{op}: x is {self.x.dim()}-D and qweight {self.qweight.dim()}-D; "
                "expected [M, K] and [N, K/2]"
            )
        k, n = self.x.shape[1], len(self.qweight)
        if n % 32 or k % max(32, group_size or 0):
            raise QtoolError(
                f"{op}: N = {n} and K = {k} must be multiples of 32 and {max(32, group_size or 0)}"
            )
        level2 = None if group_size is None else (k // group_size, n)
        self.require_operands(op, n, (n, k // 2), torch.int8, level2)

    def empty(self) -> Tensor:
        return self.x.new_empty((self.x.shape[0], len(self.qweight)), dtype=self.out_dtype)

    def reference(self) -> Tensor:
        return self.product(COMPUTE_AWARE, len(self.qweight))

    def launch(self, out: Tensor) -> None:
        if len(out):
            params = beside_s1(self.scheme, self.s2, self.offset, self.zero)
            weight = MmaWeight(self.qweight, self.s1, *params)
            kernel, k = operand(self.scheme, self.group_size), self.x.shape[1]
            given = (kernel, self.x, self.sx, weight, out, k)
            mma.run(*given, token_sum=self.token_sum, bias=self.bias)


w4a8_mma_gemm = operator("w4a8_mma_gemm", W4A8MmaGemm)
