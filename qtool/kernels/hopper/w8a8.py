"""``qtool::w8a8_gemm``: 8-bit weights by 8-bit tokens, on the W4A8 kernel's main loop.

v[m, n] = sum_k x[m, k] * weight[n, k]      int32      y = v * sx[m] * scale[n] + bias[n]
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.allocate import new_empty
from qtool.kernels.build import Build
from qtool.kernels.checks import Expected, optional, require_out_dtype, require_tensors
from qtool.kernels.dtypes import FLOATS
from qtool.kernels.hopper import gemm
from qtool.kernels.hopper.gemm import Operand, Plan, Weight
from qtool.kernels.hopper.tiles import Tile, choose
from qtool.kernels.launch import pointers
from qtool.kernels.op import Launch, operator
from qtool.schemes.arithmetic.products import int_matmul, scaled

#: 128 * 128 * K stays below 2**31
MOST_CHANNELS = 65536
OPERAND = Operand("hopper/w8a8_gemm", (), 128 * 128)


def builds() -> Iterator[Build]:
    """The widest tiles and the narrowest."""
    return gemm.builds("w8a8", OPERAND, (Tile(256), Tile(128, 256, 2), Tile(8, split=8)))


class W8A8Gemm(NamedTuple):
    """``Y [M, N]`` of ``out_dtype`` for quantized tokens and an int8 weight.

    Args:
        x: codes of the tokens, int8 ``[M, K]``.
        sx: scales of the tokens, float32 ``[M]``.
        weight: codes int8 ``[N, K]``, row-major; N and K multiples of 64.
        scale: per output channel ``[N]``, float32, float16 or bfloat16.
        bias: ``[N]`` of those, or ``None``.
        out_dtype: bfloat16, float16, float32, or int32 for the bare sums v.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    x: Tensor
    sx: Tensor
    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype

    def require(self, op: str = "w8a8_gemm") -> None:
        require_out_dtype(op, self.out_dtype)
        if self.x.dim() != 2 or self.weight.dim() != 2:
            raise QtoolError(
                f"{op}: x is {self.x.dim()}-D and weight {self.weight.dim()}-D; "
                "expected [M, K] and [N, K]"
            )
        (m, k), n = self.x.shape, self.weight.shape[0]
        if n % 64 or k % 64 or k > MOST_CHANNELS:
            raise QtoolError(
                f"{op}: the weight is {tuple(self.weight.shape)}; N and K must be multiples of 64, "
                f"K at most {MOST_CHANNELS}"
            )
        expected: dict[str, Expected] = {
            "x": (self.x, (m, k), (torch.int8,)),
            "sx": (self.sx, (m,), (torch.float32,)),
            "weight": (self.weight, (n, k), (torch.int8,)),
            "scale": (self.scale, (n,), FLOATS),
            "bias": optional(self.bias, (n,), FLOATS),
        }
        require_tensors(op, self.x.device, expected)

    def empty(self) -> Tensor:
        return new_empty(self.x, (self.x.shape[0], self.weight.shape[0]), self.out_dtype)

    def reference(self) -> Tensor:
        sums = int_matmul(self.x, self.weight)
        if self.out_dtype == torch.int32:
            return sums
        return scaled(sums, self.sx[:, None], self.scale, self.bias).to(self.out_dtype)

    def plan(self) -> Launch:
        n, k = self.weight.shape
        weight = Weight(self.scale, boxed=self.weight)
        gemm = Plan(lambda m: (OPERAND, choose(m, n, k)), weight, self.bias, (n, k), self.out_dtype)

        def launch(call: W8A8Gemm, out: Tensor) -> None:
            gemm.launch(out.shape[0], *pointers(call.x, call.sx, None, out))

        return launch


w8a8_gemm = operator("w8a8_gemm", W8A8Gemm, rows=("x", "sx"))
