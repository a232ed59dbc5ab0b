"""``qtool::w4ax_gemm``: s4 weights by s4 or s8 tokens, scaled by channel or by group.

APEX4 has both granularities, COMET groups.

    v[m, n, G] = sum_{k in G} x[m, k] * W[n, k]                int32
    y = sum_G v * sx[m, G] * sw[n, G] + bias[n]                float32

Hopper has no s4 tensor cores: codes are multiplied as s8, so that a block of 8-bit tokens
(w4ax-fmpq) takes the time of a 4-bit one. A group's sum is exact; the groups are added in float32,
in their order: each of the thread blocks that split K adds its groups, then these sums are added.
If no blocks split K (:mod:`~qtool.kernels.order`), the result equals the CPU's to the bit.

Shapes: x int8 ``[M, K]`` in the layout's :mod:`~qtool.kernels.activation.arrangement`, sx float32
``[G, M4]`` (M4: M rounded up to a multiple of 4), qweight uint8 in apex4 ``[K/32, N, 16]`` or
w4ax-interleaved ``[N, K/2]``, scale ``[G, N]``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qtool import layouts
from qtool.errors import QtoolError, suggest
from qtool.kernels.activation.arrangement import disarrange
from qtool.kernels.activation.quantize_activation_groups import GROUP_SIZES, scale_shape
from qtool.kernels.build import Build
from qtool.kernels.checks import Expected, optional, require_out_dtype, require_tensors
from qtool.kernels.dtypes import FLOATS, NUMBERS
from qtool.kernels.hopper import gemm
from qtool.kernels.hopper.gemm import Operand, Weight, run
from qtool.kernels.hopper.tiles import TABLE_S4, Tile, choose_s4
from qtool.kernels.op import operator
from qtool.kernels.order import adds_in_order
from qtool.schemes.arithmetic.products import group_matmul, int_matmul

#: number of the layout in csrc/hopper/weights_s4.cuh
LAYOUTS = {"apex4": 0, "w4ax-interleaved": 1}
#: 16 * 127 * 8 * K stays below 2**31
MOST_CHANNELS = 65536
HALF_STAGE = 64 * 64  # bytes of 64 rows x 128 columns


def operand(layout: str, group_size: int | None, scale_dtype: torch.dtype) -> Operand:
    """The kernel's operand; a stage holds 128 x 128 weights and their scales."""
    groups = 0 if group_size is None else max(1, 128 // group_size)
    defines = (
        ("LAYOUT", LAYOUTS[layout]),
        ("GROUP", group_size or 0),
        ("SCALE", NUMBERS[scale_dtype] if group_size else 0),
    )
    box = (4, 64 * 16) if layout == "apex4" else (64, 64)  # of 64 rows x 128 columns
    return Operand("hopper/w4ax_gemm", defines, 2 * HALF_STAGE + groups * 512, 4 * groups, box=box)


def builds() -> Iterator[Build]:
    """Groups of 128 with all tiles, other sizes with the widest and the narrowest tile.

    Each layout and scale dtype is among them.
    """
    grouped = [tile for tile in TABLE_S4 if tile.tokens * tile.rows <= 128 * 128]
    for layout, dtype in (("apex4", torch.float32), ("w4ax-interleaved", torch.bfloat16)):
        yield from gemm.builds(f"{layout} g128", operand(layout, 128, dtype), grouped)
    for group in (32, 64, 1024):
        yield from gemm.builds(
            f"apex4 g{group}", operand("apex4", group, torch.float16), (Tile(128), Tile(8, split=8))
        )
    yield from gemm.builds("apex4 channel", operand("apex4", None, torch.float32), TABLE_S4)


class W4AxGemm(NamedTuple):
    """``Y [M, N]`` of ``out_dtype`` for quantized tokens and a packed weight.

    Args:
        x: codes as :func:`quantize_activation_groups` returns them for ``layout``.
        sx: the scales that it returns with them.
        qweight: codes in ``layout``, ``apex4`` or ``w4ax-interleaved``.
        scale: ``[G, N]``, float32, float16 or bfloat16.
        bias: ``[N]``, float32, float16 or bfloat16, or ``None``.
        group_size: input channels that share a scale, 32 to 1024, or ``None``: all of them.
        out_dtype: bfloat16, float16, float32, or int32 for the bare sums of codes over all of K.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device, layout or GPU; one sentence.
    """

    x: Tensor
    sx: Tensor
    qweight: Tensor
    scale: Tensor
    bias: Tensor | None
    layout: str
    group_size: int | None
    out_dtype: torch.dtype

    def require(self) -> None:
        op, layout, group_size = "w4ax_gemm", self.layout, self.group_size
        require_layout(op, layout, group_size, GROUP_SIZES, self.out_dtype)
        if self.x.dim() != 2 or self.scale.dim() != 2:
            raise QtoolError(
                f"{op}: x is {self.x.dim()}-D and scale {self.scale.dim()}-D; "
                "expected [M, K] and [G, N]"
            )
        (m, k), n = self.x.shape, self.scale.shape[1]
        if n % 64 or k % 64 or k % (group_size or 64) or not 0 < k <= MOST_CHANNELS:
            raise QtoolError(
                f"{op}: N = {n} and K = {k} must be multiples of 64, K of the group size "
                f"{group_size} too, above 0 and at most {MOST_CHANNELS}"
            )
        groups = k // (group_size or k)
        expected: dict[str, Expected] = {
            "x": (self.x, (m, k), (torch.int8,)),
            "sx": (self.sx, scale_shape(groups, m), (torch.float32,)),
            "qweight": (self.qweight, stored_shape(layout, n, k), (torch.uint8,)),
            "scale": (self.scale, (groups, n), FLOATS),
            "bias": optional(self.bias, (n,), FLOATS),
        }
        require_tensors(op, self.x.device, expected)

    def empty(self) -> Tensor:
        return self.x.new_empty((self.x.shape[0], self.scale.shape[1]), dtype=self.out_dtype)

    def reference(self) -> Tensor:
        (m, k), n = self.x.shape, self.scale.shape[1]
        codes = layouts.get(self.layout).unpack({"qweight": self.qweight}, n, k, signed=True)
        natural = disarrange(self.x, self.layout)
        if self.out_dtype == torch.int32:
            return int_matmul(natural, codes)
        sx, scale = self.sx[:, :m].t(), self.scale.float().t()
        product = group_matmul(natural, sx, codes, scale, self.group_size, self.bias)
        return product.to(self.out_dtype)

    def launch(self, out: Tensor) -> None:
        if len(out) == 0:
            return
        group_size = None if out.dtype == torch.int32 else self.group_size
        split_k = group_size is None or not adds_in_order()
        tile = choose_s4(*out.shape, self.x.shape[1], group_size, split_k=split_k)
        kernel = operand(self.layout, group_size, self.scale.dtype)
        weight = Weight(self.scale, boxed=self.qweight.flatten(1))
        run(kernel, tile, self.x, self.sx, weight, out, bias=self.bias)


w4ax_gemm = operator("w4ax_gemm", W4AxGemm)


def stored_shape(layout: str, n: int, k: int) -> tuple[int, ...]:
    """The shape of the codes of a weight ``[n, k]`` in ``layout``."""
    return (k // 32, n, 16) if layout == "apex4" else (n, k // 2)


def require_layout(
    op: str,
    layout: str,
    group_size: int | None,
    group_sizes: tuple[int | None, ...],
    out_dtype: torch.dtype,
) -> None:
    """Refuse a layout, group size or output that no kernel of s4 weights and tokens has."""
    if layout not in LAYOUTS:
        raise QtoolError(f"{op}: unknown layout {layout!r}: {suggest(layout, LAYOUTS)}")
    if group_size not in group_sizes:
        raise QtoolError(f"{op}: no group size {group_size}; accepted: {group_sizes}")
    require_out_dtype(op, out_dtype)
