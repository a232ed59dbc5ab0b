"""Integer products and their scaling, rounded as in the CUDA kernels.

A sum of floats depends on its order and a product on when it is rounded. So the references compute
what the kernels' main loop and epilogue compute (csrc/hopper/epilogue.cuh, weights_s4.cuh,
mma_gemm.cuh), to the bit. ``v`` is the integer sum of products of codes; ``fma`` rounds once.

    y = fma(float(v) * sx, sw, bias)                    one scale a token and channel
    total = fma(float(v_G) * sx_G, sw_G, total)         for each G in turn: scales by group, 128
                                                        inputs at most at a time
    y = total + bias

W4A4 and FMPQ have scales by group wherever the group size is a number, even if it is K. A linear
rounds y, a float32, to the dtype of X.
"""

from functools import cache

import torch
from torch import Tensor

#: products of int8 values that float32 adds exactly: each is at most 2**14, and float32 holds every
#: integer up to 2**24
EXACT_PRODUCTS = 1024
#: input channels that a kernel's main loop scales at a time, at most
MAIN_LOOP_CHANNELS = 128
#: rows whose sums stay in a CPU's cache
ROWS = 128


def int_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a [M, K] @ b [N, K]^T`` of int8 operands, exact in int32.

    On a CPU with 8-bit dot products (VNNI) this is torch's int8 GEMM, which is twenty times slower
    than float32 on one without. Float32 adds :data:`EXACT_PRODUCTS` of them exactly in any order.
    On CUDA, where ``_int_mm`` wants M > 16 and multiples of 8, float64 is exact for any K below
    2**38.
    """
    if a.device.type != "cpu":
        return (a.double() @ b.double().t()).to(torch.int32)
    if _has_vnni():
        return torch._int_mm(a.contiguous(), b.t())
    total = torch.zeros(len(a), len(b), dtype=torch.int32)
    for x, w in zip(a.split(EXACT_PRODUCTS, 1), b.split(EXACT_PRODUCTS, 1), strict=True):
        total += (x.float() @ w.float().t()).to(torch.int32)
    return total


@cache
def _has_vnni() -> bool:
    return torch.cpu._is_vnni_supported()


def scaled(sums: Tensor, sx: Tensor, sw: Tensor, bias: Tensor | None) -> Tensor:
    """``fma(float(sums) * sx, sw, bias)`` float32 ``[M, N]``.

    ``sums [M, N]`` int32, ``sx [M, 1]`` float32, ``sw [N]`` and ``bias [N]``.
    """
    y = sums.float().mul_(sx)
    return y.mul_(sw.float()) if bias is None else fma(y, sw, bias)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``a * b + c`` float32, rounded once except in one case of 2**29.

    The product of two float32 is exact in float64.
    """
    return (a.double() * b.double()).add_(c.double()).float()


def group_matmul(
    qx: Tensor, sx: Tensor, qw: Tensor, sw: Tensor, group_size: int | None, bias: Tensor | None
) -> Tensor:
    """``sum_G (Qx_G Qw_G^T) * sx[:, G] * sw[:, G] + bias`` float32 ``[M, N]``.

    The groups are added in their order.

    ``qx [M, K]`` and ``qw [N, K]`` are int8, ``sx [M, G]`` and ``sw [N, G]`` float32. Without a
    ``group_size`` there is one group, scaled at the end. Large groups are scaled after each
    :data:`MAIN_LOOP_CHANNELS` inputs, whose sums are exact in float32 too.
    """
    if group_size is None:
        return scaled(int_matmul(qx, qw), sx, sw[:, 0], bias)
    step = min(group_size, MAIN_LOOP_CHANNELS)
    weights = [w.float().t() for w in qw.split(step, 1)]
    scales = [s.double() for s in sw.t().repeat_interleave(group_size // step, 0)]
    tokens = sx.repeat_interleave(group_size // step, 1)
    out = torch.empty(len(qx), len(qw), dtype=torch.float32, device=qx.device)
    rows = ROWS if qx.device.type == "cpu" else max(1, len(qx))
    for x, s, y in zip(qx.split(rows), tokens.split(rows), out.split(rows), strict=True):
        total = torch.zeros(y.shape, dtype=torch.float64, device=qx.device)
        for part, w, sx_part, sw_part in zip(
            x.split(step, 1), weights, s.split(1, 1), scales, strict=True
        ):
            sums = (part.float() @ w).mul_(sx_part).double().mul_(sw_part)
            # a float32 in every step, as in the kernels' registers
            total = sums.add_(total).float().double()
        y.copy_(total if bias is None else total + bias.double())
    return out
