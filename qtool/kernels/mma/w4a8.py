"""``qtool::w4a8_mma_gemm``: W4A8 on Ampere and Ada, from the compute-aware layout.

The arithmetic of :mod:`qtool.kernels.hopper.w4a8`, int32 sums by ``mma.sync.m16n8k32``; level 2
takes an IMAD and an XOR for four weights, LiquidQuant's (LiquidGEMM eq. 12) as QoQ's subtraction
after multiplication (QServe 4.2.2).

Shapes: x int8 ``[M, K]``, sx float32 ``[M]``, qweight int8 ``[N, K/2]`` (compute-aware), level-2
parameters uint8 ``[K/g, N]`` in the layout's order, s1 ``[N]``, zero uint8 ``[N]``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qtool import schemes
from qtool.errors import QtoolError, suggest
from qtool.kernels.build import Build
from qtool.kernels.checks import SCALES, Expected, require_tensors
from qtool.kernels.hopper.gemm import KINDS
from qtool.kernels.hopper.w4a8 import MOST_CHANNELS, SCHEMES
from qtool.kernels.mma import gemm as mma
from qtool.kernels.mma.gemm import MmaOperand, MmaWeight
from qtool.layouts.compute_aware import COMPUTE_AWARE
from qtool.schemes.arithmetic.products import int_matmul, scaled


def operand(scheme: str, group_size: int | None) -> MmaOperand:
    """What the kernel of a scheme is compiled with."""
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


@torch.library.custom_op("qtool::w4a8_mma_gemm", mutates_args=())
def w4a8_mma_gemm(
    x: Tensor,
    sx: Tensor,
    qweight: Tensor,
    s1: Tensor,
    s2: Tensor | None,
    offset: Tensor | None,
    zero: Tensor | None,
    token_sum: Tensor,
    bias: Tensor | None,
    scheme: str,
    group_size: int | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``Y [M, N]`` of ``out_dtype`` for quantized tokens and a packed weight.

    Args:
        x, sx: codes int8 ``[M, K]`` and scales float32 ``[M]`` of the tokens.
        qweight, s2, offset, zero: codes and level-2 parameters as the compute-aware layout stores
            them.
        s1: scale per output channel ``[N]``, float32, float16 or bfloat16.
        token_sum: ``sum_k x[m, k]``, int32 ``[M]``, which QoQ per channel multiplies by its zero
            points ``[N]``.
        bias: ``[N]``, float32, float16 or bfloat16.
        scheme, group_size: ``w4a8-lqq`` or ``w4a8-qoq-g128`` with 32, 64, 128; ``w4a8-qoq`` with
            ``None``.
        out_dtype: bfloat16, float16, float32, or int32 for the bare sums.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device, scheme or GPU; one sentence.
    """
    n = _require(
        x, sx, qweight, s1, s2, offset, zero, token_sum, bias, scheme, group_size, out_dtype
    )
    codes = COMPUTE_AWARE.unpack({"qweight": qweight}, n, x.shape[1], signed=False)
    if scheme == "w4a8-qoq":
        assert zero is not None
        sums = int_matmul(x, codes.to(torch.int8)) - token_sum[:, None] * zero.to(torch.int32)
    else:
        level2 = {"s2": s2, "offset": offset, "zero": zero}
        params = {"s1": s1} | {
            name: COMPUTE_AWARE.unpack_group(t, n) for name, t in level2.items() if t is not None
        }
        sums = int_matmul(x, schemes.get(scheme, group_size).level2(codes, params))  # type: ignore[attr-defined]
    if out_dtype == torch.int32:
        return sums
    return scaled(sums, sx[:, None], s1, bias).to(out_dtype)


@w4a8_mma_gemm.register_kernel("cuda")
def _(
    x: Tensor,
    sx: Tensor,
    qweight: Tensor,
    s1: Tensor,
    s2: Tensor | None,
    offset: Tensor | None,
    zero: Tensor | None,
    token_sum: Tensor,
    bias: Tensor | None,
    scheme: str,
    group_size: int | None,
    out_dtype: torch.dtype,
) -> Tensor:
    n = _require(
        x, sx, qweight, s1, s2, offset, zero, token_sum, bias, scheme, group_size, out_dtype
    )
    m, k = x.shape
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if m == 0:
        return out
    weight, kernel = (
        packed_weight(scheme, qweight, s1, s2, offset, zero),
        operand(scheme, group_size),
    )
    mma.run(kernel, x, sx, weight, out, k, token_sum=token_sum, bias=bias)
    return out


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


@w4a8_mma_gemm.register_fake
def _(
    x: Tensor,
    sx: Tensor,
    qweight: Tensor,
    s1: Tensor,
    s2: Tensor | None,
    offset: Tensor | None,
    zero: Tensor | None,
    token_sum: Tensor,
    bias: Tensor | None,
    scheme: str,
    group_size: int | None,
    out_dtype: torch.dtype,
) -> Tensor:
    n = _require(
        x, sx, qweight, s1, s2, offset, zero, token_sum, bias, scheme, group_size, out_dtype
    )
    return x.new_empty((x.shape[0], n), dtype=out_dtype)


def _require(
    x: Tensor,
    sx: Tensor,
    qweight: Tensor,
    s1: Tensor,
    s2: Tensor | None,
    offset: Tensor | None,
    zero: Tensor | None,
    token_sum: Tensor,
    bias: Tensor | None,
    scheme: str,
    group_size: int | None,
    out_dtype: torch.dtype,
) -> int:
    """Refuse what the kernel cannot do; returns N."""
    op = "w4a8_mma_gemm"
    if scheme not in SCHEMES:
        raise QtoolError(f"{op}: unknown scheme {scheme!r}: {suggest(scheme, SCHEMES)}")
    sizes: tuple[int | None, ...] = (None,) if scheme == "w4a8-qoq" else (32, 64, 128)
    if group_size not in sizes:
        raise QtoolError(f"{op}: {scheme} has no group size {group_size}; accepted: {sizes}")
    if out_dtype not in KINDS:
        raise QtoolError(f"{op}: out_dtype is {out_dtype}; accepted: {', '.join(map(str, KINDS))}")
    if x.dim() != 2 or qweight.dim() != 2:
        raise QtoolError(
            f"{op}: x is {x.dim()}-D and qweight {qweight.dim()}-D; expected [M, K] and [N, K/2]"
        )
    (m, k), n = x.shape, qweight.shape[0]
    if k > MOST_CHANNELS:
        raise QtoolError(
            f"{op}: K = {k}; the int32 sums are exact up to {MOST_CHANNELS} input channels"
        )
    if n % 32 or k % max(32, group_size or 0):
        raise QtoolError(
            f"{op}: N = {n} and K = {k} must be multiples of 32 and {max(32, group_size or 0)}"
        )
    level2 = None if group_size is None else (k // group_size, n)
    expected: dict[str, Expected] = {
        "x": (x, (m, k), (torch.int8,)),
        "sx": (sx, (m,), (torch.float32,)),
        "qweight": (qweight, (n, k // 2), (torch.int8,)),
        "s1": (s1, (n,), SCALES),
        "s2": (s2, level2, (torch.uint8,)),
        "offset": (offset, level2 if scheme == "w4a8-lqq" else None, (torch.uint8,)),
        "zero": (
            zero,
            {"w4a8-lqq": None, "w4a8-qoq-g128": level2, "w4a8-qoq": (n,)}[scheme],
            (torch.uint8,),
        ),
        "token_sum": (token_sum, (m,), (torch.int32,)),
        "bias": (bias, None if bias is None else (n,), SCALES),
    }
    require_tensors(op, x.device, expected)
    return n
