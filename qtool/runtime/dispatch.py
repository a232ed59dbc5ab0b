"""Which kernel multiplies a packed linear on which GPU; where there is none, the scheme's reference does.

Both give the same int32 sums. A kernel reads the stored bytes as they are: no repacking at load.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.runtime.format import LinearFormat

#: (codes int8 [M, K], scales [M], code sums [M], stored tensors, bias, format, out_dtype) -> [M, N]
Multiply = Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor], Tensor | None, LinearFormat, torch.dtype], Tensor]


@dataclass(frozen=True)
class Kernel:
    """A GEMM on quantized tokens: its name and precision for reports, and the call."""

    name: str
    precision: str
    multiply: Multiply


def _w4a8(
    x: Tensor,
    sx: Tensor,
    token_sum: Tensor,
    stored: Mapping[str, Tensor],
    bias: Tensor | None,
    linear_format: LinearFormat,
    out_dtype: torch.dtype,
) -> Tensor:
    from qtool.kernels.w4a8 import w4a8_gemm

    s2, offset, zero = (stored.get(name) for name in ("s2", "offset", "zero"))
    scheme, group_size = linear_format.scheme, linear_format.group_size
    return w4a8_gemm(
        x, sx, stored["qweight"], stored["s1"], s2, offset, zero, token_sum, bias, scheme, group_size, out_dtype
    )


def _w8a8(
    x: Tensor,
    sx: Tensor,
    token_sum: Tensor,
    stored: Mapping[str, Tensor],
    bias: Tensor | None,
    linear_format: LinearFormat,
    out_dtype: torch.dtype,
) -> Tensor:
    from qtool.kernels.w8a8 import w8a8_gemm

    return w8a8_gemm(x, sx, stored["qweight"].view(torch.int8), stored["scale"][:, 0], bias, out_dtype)


W4A8 = Kernel("w4a8_gemm", "int8 x int8 wgmma, int32 sums", _w4a8)
W8A8 = Kernel("w8a8_gemm", "int8 x int8 wgmma, int32 sums", _w8a8)
KERNELS = {
    ("w4a8-lqq", "dual-mma"): W4A8,
    ("w4a8-qoq", "dual-mma"): W4A8,
    ("w4a8-qoq-g128", "dual-mma"): W4A8,
    ("w8a8", "row-major-8"): W8A8,
}


def kernel_for(linear_format: LinearFormat, n: int, k: int, device: torch.device) -> Kernel | None:
    """The kernel for a weight ``[n, k]`` on ``device``, or None: the reference runs.

    The kernels are Hopper's (wgmma, sm_90) and want multiples of 64.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0) or n % 64 or k % 64:
        return None
    return KERNELS.get((linear_format.scheme, linear_format.layout))
