"""``qtool::w8a8_gemm``: 8-bit weights by 8-bit tokens (SmoothQuant), on the main loop of the W4A8
kernel.

v[m, n] = sum_k x[m, k] * weight[n, k]      int32      y = v * sx[m] * scale[n] + bias[n]
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import Build
from qtool.kernels.checks import SCALES, Expected, require_tensors
from qtool.kernels.hopper import gemm
from qtool.kernels.hopper.gemm import KINDS, Operand, Weight, run
from qtool.kernels.hopper.tiles import Tile, choose
from qtool.schemes.arithmetic.products import int_matmul, scaled

OPERAND = Operand("hopper/w8a8_gemm", (), 128 * 128)


def builds() -> Iterator[Build]:
    """The widest tiles and the narrowest."""
    return gemm.builds("w8a8", OPERAND, (Tile(256), Tile(128, 256, 2), Tile(8, split=8)))


@torch.library.custom_op("qtool::w8a8_gemm", mutates_args=())
def w8a8_gemm(
    x: Tensor,
    sx: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """``Y [M, N]`` of ``out_dtype`` for quantized tokens and an int8 weight.

    Args:
        x, sx: codes int8 ``[M, K]`` and scales float32 ``[M]`` of the tokens.
        weight: codes int8 ``[N, K]``, row-major; N and K multiples of 64.
        scale: per output channel ``[N]``, float32, float16 or bfloat16. bias: ``[N]`` of those, or
            ``None``.
        out_dtype: bfloat16, float16, float32, or int32 for the bare sums v.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """
    _require(x, sx, weight, scale, bias, out_dtype)
    sums = int_matmul(x, weight)
    if out_dtype == torch.int32:
        return sums
    return scaled(sums, sx[:, None], scale, bias).to(out_dtype)


@w8a8_gemm.register_kernel("cuda")
def _(
    x: Tensor,
    sx: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    _require(x, sx, weight, scale, bias, out_dtype)
    (m, k), n = x.shape, weight.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=x.device)
    if m == 0:
        return out
    run(OPERAND, choose(m, n, k), x, sx, Weight(scale, boxed=weight), out, bias=bias)
    return out


@w8a8_gemm.register_fake
def _(
    x: Tensor,
    sx: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    _require(x, sx, weight, scale, bias, out_dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=out_dtype)


def _require(
    x: Tensor,
    sx: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    if out_dtype not in KINDS:
        raise QtoolError(
            f"w8a8_gemm: out_dtype is {out_dtype}; accepted: {', '.join(map(str, KINDS))}"
        )
    if x.dim() != 2 or weight.dim() != 2:
        raise QtoolError(
            f"w8a8_gemm: x is {x.dim()}-D and weight {weight.dim()}-D; expected [M, K] and [N, K]"
        )
    (m, k), n = x.shape, weight.shape[0]
    if n % 64 or k % 64:
        raise QtoolError(
            f"w8a8_gemm: the weight is {tuple(weight.shape)}; N and K must be multiples of 64"
        )
    expected: dict[str, Expected] = {
        "x": (x, (m, k), (torch.int8,)),
        "sx": (sx, (m,), (torch.float32,)),
        "weight": (weight, (n, k), (torch.int8,)),
        "scale": (scale, (n,), SCALES),
        "bias": (bias, None if bias is None else (n,), SCALES),
    }
    require_tensors("w8a8_gemm", x.device, expected)
