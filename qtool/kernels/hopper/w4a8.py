"""``qtool::w4a8_gemm``: 4-bit weights by 8-bit tokens, with exact int32 sums.

Scales and bias are applied in the epilogue.

    v[m, n] = sum_k x[m, k] * W8[n, k]      int32      y = v * sx[m] * s1[n] + bias[n]

The scheme defines W8: LiquidQuant ``q * s2 + a - 128`` (LiquidGEMM section 4), QoQ per group
``(q - z) * s2`` (QServe 4.2.2), QoQ per channel ``q - z`` with ``v = sum x q - z * sum x``.

Shapes: x int8 ``[M, K]``, sx float32 ``[M]``, qweight uint8 ``[N/64, K/64, 2048]`` (dual-MMA),
level-2 parameters uint8 ``[N/64, K/g, 64]`` in the same thread order, s1 ``[N]``, zero uint8
``[N]``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtool import schemes
from qtool.errors import QtoolError, suggest
from qtool.kernels.allocate import new_empty
from qtool.kernels.build import Build
from qtool.kernels.checks import Expected, optional, require_out_dtype, require_tensors
from qtool.kernels.dtypes import FLOATS
from qtool.kernels.hopper import gemm
from qtool.kernels.hopper.gemm import Operand, Plan, Weight
from qtool.kernels.hopper.tiles import TABLE, Tile, choose
from qtool.kernels.launch import pointers
from qtool.kernels.op import Launch, operator
from qtool.layouts.base import Layout
from qtool.layouts.dual_mma import DUAL_MMA
from qtool.schemes.arithmetic.products import int_matmul, scaled

#: number of the scheme in csrc/hopper/weights_w4.cuh
SCHEMES = {"w4a8-lqq": 0, "w4a8-qoq-g128": 1, "w4a8-qoq": 2}

#: 255 * 128 * K stays below 2**31
MOST_CHANNELS = 65536


def operand(scheme: str, group_size: int | None) -> Operand:
    """The operand of a scheme's kernel; a stage holds 128 x 128 weights."""
    level2 = 0 if group_size is None else 2 * 2 * 64 * (128 // group_size)
    return Operand(
        "hopper/w4a8_gemm",
        (("SCHEME", SCHEMES[scheme]), ("GROUP", group_size or 128)),
        8192 + level2,
    )


def builds() -> Iterator[Build]:
    """LiquidQuant g64 with every width, the others with the widest and the narrowest."""
    yield from gemm.builds("w4a8-lqq g64", operand("w4a8-lqq", 64), TABLE)
    for scheme, group in (
        ("w4a8-lqq", 32),
        ("w4a8-lqq", 128),
        ("w4a8-qoq-g128", 128),
        ("w4a8-qoq", None),
    ):
        yield from gemm.builds(
            f"{scheme} g{group}", operand(scheme, group), (Tile(256), Tile(8, split=8))
        )


class W4A8Gemm(NamedTuple):
    """``Y [M, N]`` of ``out_dtype`` for quantized tokens and a packed weight.

    Args:
        x: codes of the tokens, int8 ``[M, K]``.
        sx: scales of the tokens, float32 ``[M]``.
        qweight: codes in the dual-MMA layout.
        s1: scale per output channel ``[N]``, float32, float16 or bfloat16.
        s2: level-2 scales 1..16; ``None`` for ``w4a8-qoq``.
        offset: LiquidQuant's ``a = 128 + lo``; ``None`` for QoQ.
        zero: QoQ's zero points, per group like ``s2`` or per channel ``[N]``; ``None`` for
            LiquidQuant.
        token_sum: ``sum_k x[m, k]``, int32 ``[M]``, as :func:`quantize_activation` returns it. The
            kernel's weights are unsigned, too large by 128 (or the zero point), and this sum
            corrects the product for it.
        bias: ``[N]``, float32, float16 or bfloat16.
        scheme: ``w4a8-lqq``, ``w4a8-qoq-g128`` or ``w4a8-qoq``.
        group_size: 32, 64 or 128; ``None`` for ``w4a8-qoq``.
        out_dtype: bfloat16, float16, float32, or int32 for the bare sums v.

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

    def require(self, op: str = "w4a8_gemm") -> None:
        scheme, group_size = self.scheme, self.group_size
        require_scheme(op, scheme, group_size, self.out_dtype)
        if self.x.dim() != 2 or self.qweight.dim() != 3:
            raise QtoolError(
                f"{op}: x is {self.x.dim()}-D and qweight {self.qweight.dim()}-D; "
                "expected [M, K] and [N/64, K/64, 2048]"
            )
        k, n = self.x.shape[1], self.qweight.shape[0] * 64
        if k % 64 or (group_size and k % group_size):
            raise QtoolError(f"{op}: K = {k} is not a multiple of {max(64, group_size or 0)}")
        level2 = None if group_size is None else (n // 64, k // group_size, 64)
        self.require_operands(op, n, (n // 64, k // 64, 2048), torch.uint8, level2)

    def require_operands(
        self,
        op: str,
        n: int,
        stored: tuple[int, ...],
        dtype: torch.dtype,
        level2: tuple[int, ...] | None,
    ) -> None:
        """Refuse tensors that do not fit N = ``n``, and a K beyond what int32 sums hold.

        Args:
            stored: shape of ``qweight`` in its layout, and ``dtype`` its dtype.
            level2: shape of the level-2 parameters in the layout; None: the scheme has none.
        """
        (m, k), scheme = self.x.shape, self.scheme
        if k > MOST_CHANNELS:
            raise QtoolError(
                f"{op}: K = {k}; the int32 sums are exact up to {MOST_CHANNELS} input channels"
            )
        zero = {"w4a8-lqq": None, "w4a8-qoq-g128": level2, "w4a8-qoq": (n,)}[scheme]
        expected: dict[str, Expected] = {
            "x": (self.x, (m, k), (torch.int8,)),
            "sx": (self.sx, (m,), (torch.float32,)),
            "qweight": (self.qweight, stored, (dtype,)),
            "s1": (self.s1, (n,), FLOATS),
            "s2": (self.s2, level2, (torch.uint8,)),
            "offset": (self.offset, level2 if scheme == "w4a8-lqq" else None, (torch.uint8,)),
            "zero": (self.zero, zero, (torch.uint8,)),
            "token_sum": (self.token_sum, (m,), (torch.int32,)),
            "bias": optional(self.bias, (n,), FLOATS),
        }
        require_tensors(op, self.x.device, expected)

    def empty(self) -> Tensor:
        n = self.qweight.shape[0] * 64
        return new_empty(self.x, (self.x.shape[0], n), self.out_dtype)

    def reference(self) -> Tensor:
        return self.product(DUAL_MMA, self.qweight.shape[0] * 64)

    def product(self, layout: Layout, n: int) -> Tensor:
        """The exact result for a weight of ``n`` output channels in ``layout``."""
        x = self.x
        codes = layout.unpack({"qweight": self.qweight}, n, x.shape[1], signed=False)
        groups = {"s2": self.s2, "offset": self.offset, "zero": self.zero}
        if self.scheme == "w4a8-qoq":
            assert self.zero is not None
            sums = int_matmul(x, codes.to(torch.int8))
            sums -= self.token_sum[:, None] * self.zero.to(torch.int32)
        else:
            params = {"s1": self.s1} | {
                name: layout.unpack_group(t, n) for name, t in groups.items() if t is not None
            }
            scheme: Any = schemes.get(self.scheme, self.group_size)
            sums = int_matmul(x, scheme.level2(codes, params))
        if self.out_dtype == torch.int32:
            return sums
        return scaled(sums, self.sx[:, None], self.s1, self.bias).to(self.out_dtype)

    def plan(self) -> Launch:
        n, k = self.qweight.shape[0] * 64, self.x.shape[1]
        tensors = self.qweight, self.s1, self.s2, self.offset, self.zero
        weight, kernel = packed_weight(self.scheme, *tensors), operand(self.scheme, self.group_size)
        gemm = Plan(lambda m: (kernel, choose(m, n, k)), weight, self.bias, (n, k), self.out_dtype)

        def launch(call: W4A8Gemm, out: Tensor) -> None:
            gemm.launch(out.shape[0], *pointers(call.x, call.sx, call.token_sum, out))

        return launch


w4a8_gemm = operator("w4a8_gemm", W4A8Gemm, rows=("x", "sx", "token_sum"))


def packed_weight(
    scheme: str,
    qweight: Tensor,
    s1: Tensor,
    s2: Tensor | None,
    offset: Tensor | None,
    zero: Tensor | None,
) -> Weight:
    """The op's tensors as the kernel takes them, unchecked."""
    return Weight(s1, qweight, *beside_s1(scheme, s2, offset, zero))


def beside_s1(
    scheme: str, s2: Tensor | None, offset: Tensor | None, zero: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """``scale2``, ``offset2`` and ``zero1`` of a kernel's weight."""
    if scheme == "w4a8-qoq":
        return None, None, zero
    return s2, offset if scheme == "w4a8-lqq" else zero, None


def require_scheme(op: str, scheme: str, group_size: int | None, out_dtype: torch.dtype) -> None:
    """Refuse a scheme, group size or output that no W4A8 kernel has."""
    if scheme not in SCHEMES:
        raise QtoolError(f"{op}: unknown scheme {scheme!r}: {suggest(scheme, SCHEMES)}")
    sizes: tuple[int | None, ...] = (None,) if scheme == "w4a8-qoq" else (32, 64, 128)
    if group_size not in sizes:
        raise QtoolError(f"{op}: {scheme} has no group size {group_size}; accepted: {sizes}")
    require_out_dtype(op, out_dtype)
