"""``qtool::w4a16_gemm`` and ``w4a16_24_gemm``: 4-bit weights under 16-bit tokens.

MARLIN and Sparse-MARLIN.

    y[m, n] = sum_G scale[n, G] * sum_{k in G} x[m, k] * (q[n, k] - 8) + bias[n]

Sums are float32. With mma.sync products are exact: a scale multiplies its group's sum, and no
weight is rounded to 16 bits (MARLIN rounds it). Hopper's wgmma (:mod:`qtool.kernels.hopper.w4a16`)
does the same for up to 32 tokens, for scales per channel, and for scales of another dtype than x.
For more tokens it rounds the weights of groups to x's dtype before it multiplies them. The CPU
reference rounds no weight. For 2:4 sparse weights both multiply only the kept weights.

Shapes: x ``[M, K]``; marlin: qweight int32 ``[K/16, 2 N]``; marlin-24: qweight int32 and metadata
int16 ``[K/32, 2 N]``; scale ``[G, N]`` (G = K / 32, 64 or 128), or ``[1, N]`` per channel; each in
its layout's order.
"""

from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from qtool import schemes
from qtool.errors import QtoolError
from qtool.kernels.allocate import new_empty
from qtool.kernels.build import ARCHITECTURES, Build
from qtool.kernels.checks import Expected, optional, require_out_dtype, require_tensors
from qtool.kernels.dtypes import FLOATS, HALF
from qtool.kernels.hopper import w4a16 as wgmma
from qtool.kernels.launch import compute_capability
from qtool.kernels.mma.half_gemm import HalfWeight, Variant, definition, run
from qtool.kernels.mma.half_tiles import TABLE, choose
from qtool.kernels.op import Launch, operator
from qtool.layouts.base import Layout
from qtool.layouts.marlin import MARLIN
from qtool.layouts.marlin_24 import MARLIN_24

HOPPER = (9, 0)
#: up to so many tokens mma.sync is faster than wgmma on Hopper
MOST_BY_MMA = 16


class W4A16Gemm(NamedTuple):
    """``Y [M, N]`` of ``out_dtype`` for a weight in the marlin layout.

    Args:
        x: tokens, float16 or bfloat16 ``[M, K]``, K a multiple of 128.
        qweight: int32 ``[K/16, 2 N]``, N a multiple of 64.
        scale: ``[G, N]`` or ``[1, N]``, float32, float16 or bfloat16.
        bias: ``[N]`` of one of these dtypes, or ``None``.
        out_dtype: bfloat16, float16 or float32.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    x: Tensor
    qweight: Tensor
    scale: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype

    @property
    def weight(self) -> HalfWeight:
        return HalfWeight(self.qweight, self.scale)

    def require(self, op: str = "w4a16_gemm") -> None:
        _require(op, self)

    def empty(self) -> Tensor:
        return new_empty(self.x, (self.x.shape[0], self.weight.shape[0]), self.out_dtype)

    def reference(self) -> Tensor:
        return _reference(self, "w4a16", MARLIN, {"qweight": self.qweight})

    def plan(self) -> Launch:
        return _plan(self)


class W4A16SparseGemm(NamedTuple):
    """``Y [M, N]`` as in :class:`W4A16Gemm`, for a 2:4 sparse weight in the marlin-24 layout.

    Args:
        qweight: the kept codes, int32 ``[K/32, 2 N]``, N a multiple of 128.
        metadata: the positions of the kept codes, int16 ``[K/32, 2 N]``.
    """

    x: Tensor
    qweight: Tensor
    metadata: Tensor
    scale: Tensor
    bias: Tensor | None
    out_dtype: torch.dtype

    @property
    def weight(self) -> HalfWeight:
        return HalfWeight(self.qweight, self.scale, self.metadata)

    def require(self) -> None:
        _require("w4a16_24_gemm", self)

    def empty(self) -> Tensor:
        return new_empty(self.x, (self.x.shape[0], self.weight.shape[0]), self.out_dtype)

    def reference(self) -> Tensor:
        packed = {"qweight": self.qweight, "metadata": self.metadata}
        return _reference(self, "w4a16-24", MARLIN_24, packed)

    def plan(self) -> Launch:
        return _plan(self)


w4a16_gemm = operator("w4a16_gemm", W4A16Gemm, rows=("x",))
w4a16_24_gemm = operator("w4a16_24_gemm", W4A16SparseGemm, rows=("x",))


def _reference(
    call: W4A16Gemm | W4A16SparseGemm, scheme: str, layout: Layout, packed: dict[str, Tensor]
) -> Tensor:
    """The scheme's own product with the weight that ``packed`` and the scales stand for."""
    n, k = call.weight.shape
    codes = layout.unpack(packed, n, k, signed=False)
    params = {"scale": layout.unpack_group(call.scale, n)}
    own = schemes.get(scheme, call.weight.group or None)
    return own.matmul(call.x, codes, params, call.bias).to(call.out_dtype)


def by_wgmma(m: int, capability: tuple[int, int]) -> bool:
    """Whether ``m`` tokens are multiplied by Hopper's wgmma."""
    return capability == HOPPER and m > MOST_BY_MMA


def _plan(first: W4A16Gemm | W4A16SparseGemm) -> Launch:
    """Launches by the kernel for the number of tokens and the GPU of the ``first`` call."""
    capability = compute_capability(first.x.device)
    wide = None
    if capability == HOPPER:
        wide = wgmma.plan(first.x.dtype, first.weight, first.bias, first.out_dtype)

    def launch(call: W4A16Gemm | W4A16SparseGemm, out: Tensor) -> None:
        m = out.shape[0]
        if wide and by_wgmma(m, capability):
            wide.launch(m, call.x.data_ptr(), 0, 0, out.data_ptr())
        elif m:
            run(choose(*out.shape, capability), call.x, call.weight, out, call.bias)

    return launch


def _require(op: str, call: W4A16Gemm | W4A16SparseGemm) -> None:
    """Refuse what the kernel cannot do."""
    x, weight, bias = call.x, call.weight, call.bias
    require_out_dtype(op, call.out_dtype, FLOATS)
    for name, tensor in (("x", x), ("qweight", weight.qweight), ("scale", weight.scale)):
        if tensor.dim() != 2:
            raise QtoolError(f"{op}: {name} is {tensor.dim()}-D; expected a matrix")
    (n, k), groups = weight.shape, weight.scale.shape[0]
    sparse = weight.metadata is not None
    tile = 128 if sparse else 64
    if n == 0 or k == 0 or n % tile or k % 128:
        raise QtoolError(
            f"{op}: the weight is {n} x {k}; N must be a multiple of {tile} and K of 128"
        )
    if groups != 1 and k / max(groups, 1) not in (32, 64, 128):
        raise QtoolError(
            f"{op}: scale has {groups} rows for K = {k}; "
            "expected 1, or one for every 32, 64 or 128 inputs"
        )
    stored = (k // (32 if sparse else 16), 2 * n)
    expected: dict[str, Expected] = {
        "x": (x, (x.shape[0], k), HALF),
        "qweight": (weight.qweight, stored, (torch.int32,)),
        "metadata": (weight.metadata, stored if sparse else None, (torch.int16,)),
        "scale": (weight.scale, (groups, n), FLOATS),
        "bias": optional(bias, (n,), FLOATS),
    }
    require_tensors(op, x.device, expected)


def builds() -> Iterator[Build]:
    """All tiles on their architectures, with and without sparsity.

    The other variants have one tile each.
    """
    bf16 = torch.bfloat16
    for (capability, tiles), sparse in product(TABLE.items(), (False, True)):
        arch, hopper = ARCHITECTURES[capability][0], capability == HOPPER
        variants = [(Variant(sparse, 128, bf16, bf16, bf16), tile) for tile in dict.fromkeys(tiles)]
        for group, (x, scale) in product(
            (0, 32, 64), ((torch.float16, torch.float32), (bf16, torch.float16))
        ):
            variants.append((Variant(sparse, group, x, scale, torch.float32), tiles[-1]))
        for variant, tile in variants:
            kind = f"w4a16{'-24' if sparse else ''} g{variant.group}"
            name = f"{kind} {variant.x} {variant.scale} {tile}"
            source = definition(variant, tile, capability, hopper=hopper)
            instruction = ("HMMA.SP.16832.F32" if sparse else "HMMA.16816.F32") + (
                ".BF16" if variant.x == bf16 else ""
            )
            yield Build(name, arch, source, tile.threads * tile.blocks_per_sm, (instruction,))
