"""``qtool::w4ax_mma_gemm``: s4 weights by s4 tokens on Ampere's and Ada's s4 tensor cores.

Blocks of 8 bits have s8 tokens.

    v[m, n, G] = sum_{k in G} x[m, k] * W[n, k]                int32
    y = sum_G v * sx[m, G] * sw[n, G] + bias[n]                float32

The arithmetic is that of :mod:`qtool.kernels.hopper.w4ax`. Tokens of 4 bits are nibbles
(:mod:`qtool.kernels.activation.quantize_packed_groups`), multiplied by ``mma.sync.m16n8k64`` s4;
in a block of 128 that ``eight_bit`` marks (COMET) they stay s8, and the weight's nibbles become s8
by zero extension. Hopper and later GPUs emulate s4, which is right but slow.

Shapes: x uint8 ``[M, K/2]``, with ``eight_bit`` ``[M, K]``; sx float32 ``[G, M4]`` (M4: M rounded
up to a multiple of 4), qweight uint8 in apex4 ``[K/32, N, 16]`` or w4ax-interleaved ``[N, K/2]``,
scale ``[G, N]``, eight_bit uint8 ``[K/128]``.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.activation.quantize_activation_groups import GROUP_SIZES, scale_shape
from qtool.kernels.activation.quantize_packed_groups import unpack_tokens
from qtool.kernels.build import Build
from qtool.kernels.checks import Expected, optional, require_tensors
from qtool.kernels.dtypes import FLOATS, NUMBERS
from qtool.kernels.hopper.w4ax import (
    LAYOUTS,
    MOST_CHANNELS,
    W4AxGemm,
    require_layout,
    stored_shape,
)
from qtool.kernels.mma import gemm as mma
from qtool.kernels.mma.gemm import MmaOperand, MmaWeight
from qtool.kernels.op import operator
from qtool.kernels.order import adds_in_order
from qtool.schemes.fmpq import BLOCK

#: tiles for scales per channel: groups would take registers for a second set of sums
CHANNEL_TILES = (*mma.NARROW_TILES, mma.MmaTile(4, 2, 64))


def operand(
    layout: str, group_size: int | None, scale_dtype: torch.dtype, mixed: bool
) -> MmaOperand:
    """The operand that the kernel is compiled with."""
    groups = 0 if group_size is None else max(1, 128 // group_size)
    defines = (
        ("LAYOUT", LAYOUTS[layout]),
        ("GROUP", group_size or 0),
        ("SCALE", NUMBERS[scale_dtype] if group_size else 0),
        ("MIXED", int(mixed)),
    )
    row = 64 + groups * (4 if scale_dtype == torch.float32 else 2)
    tiles = mma.NARROW_TILES if group_size else CHANNEL_TILES
    return MmaOperand("mma/mma_s4_gemm", defines, row, (128 if mixed else 64) + 4 * groups, tiles)


def builds() -> Iterator[Build]:
    """APEX4's groups and whole channels, COMET's mixed blocks."""
    for group in (128, 32, None):
        kernel = operand("apex4", group, torch.float32, mixed=False)
        instruction = "IMMA.16832.S4.S4" if group == 32 else "IMMA.16864.S4.S4"
        yield from mma.builds(f"mma apex4 g{group}", kernel, instruction, s4=True, all_tiles=True)
    for dtype, all_tiles in ((torch.float32, True), (torch.bfloat16, False)):
        kernel = operand("w4ax-interleaved", BLOCK, dtype, mixed=True)
        name, instruction = f"mma w4ax-interleaved {dtype}", "IMMA.16864.S4.S4"
        yield from mma.builds(name, kernel, instruction, s4=True, all_tiles=all_tiles)


class W4AxMmaGemm(NamedTuple):
    """``Y [M, N]`` of ``out_dtype`` for quantized tokens and a packed weight.

    Args:
        x: codes as :func:`quantize_packed_groups` returns them for ``layout``.
        sx: the scales that it returns with them.
        qweight: codes in ``layout``, ``apex4`` or ``w4ax-interleaved``.
        scale: ``[G, N]``, float32, float16 or bfloat16.
        bias: ``[N]``, float32, float16 or bfloat16, or ``None``.
        eight_bit: uint8 ``[K/128]``, 1 for blocks whose tokens have 8 bits, or ``None``: no block.
        group_size: input channels that share a scale, 32 to 1024, or ``None``: all; 128 with
            ``eight_bit``.
        out_dtype: bfloat16, float16, float32, or int32 for the bare sums of codes over all of K.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device, layout or GPU; one sentence.
    """

    x: Tensor
    sx: Tensor
    qweight: Tensor
    scale: Tensor
    eight_bit: Tensor | None
    bias: Tensor | None
    layout: str
    group_size: int | None
    out_dtype: torch.dtype

    @property
    def k(self) -> int:
        """Input channels."""
        return self.x.shape[1] * (2 if self.eight_bit is None else 1)

    def require(self) -> None:
        op, layout, group_size = "w4ax_mma_gemm", self.layout, self.group_size
        sizes = GROUP_SIZES if self.eight_bit is None else (BLOCK,)
        require_layout(op, layout, group_size, sizes, self.out_dtype)
        if self.x.dim() != 2 or self.scale.dim() != 2:
            raise QtoolError(
                f"{op}: x is {self.x.dim()}-D and scale {self.scale.dim()}-D; "
                "expected [M, K/2] and [G, N]"
            )
        m, n, k = self.x.shape[0], self.scale.shape[1], self.k
        if n % 8 or k % max(32, group_size or 0) or not 0 < k <= MOST_CHANNELS:
            raise QtoolError(
                f"{op}: N = {n} must be a multiple of 8, K = {k} one of 32 and of the group size "
                f"{group_size}, above 0 and at most {MOST_CHANNELS}"
            )
        groups = k // (group_size or k)
        expected: dict[str, Expected] = {
            "x": (self.x, tuple(self.x.shape), (torch.uint8,)),
            "sx": (self.sx, scale_shape(groups, m), (torch.float32,)),
            "qweight": (self.qweight, stored_shape(layout, n, k), (torch.uint8,)),
            "scale": (self.scale, (groups, n), FLOATS),
            "eight_bit": optional(self.eight_bit, (k // BLOCK,), (torch.uint8,)),
            "bias": optional(self.bias, (n,), FLOATS),
        }
        require_tensors(op, self.x.device, expected)

    def empty(self) -> Tensor:
        return self.x.new_empty((self.x.shape[0], self.scale.shape[1]), dtype=self.out_dtype)

    def reference(self) -> Tensor:
        x = unpack_tokens(self.x, self.eight_bit)
        how = (self.bias, self.layout, self.group_size, self.out_dtype)
        return W4AxGemm(x, self.sx, self.qweight, self.scale, *how).reference()

    def launch(self, out: Tensor) -> None:
        if len(out) == 0:
            return
        group_size = None if out.dtype == torch.int32 else self.group_size
        kernel = operand(self.layout, group_size, self.scale.dtype, self.eight_bit is not None)
        weight = MmaWeight(self.qweight, self.scale, eight_bit=self.eight_bit)
        split_k = group_size is None or not adds_in_order()
        mma.run(kernel, self.x, self.sx, weight, out, self.k, bias=self.bias, split_k=split_k)


w4ax_mma_gemm = operator("w4ax_mma_gemm", W4AxMmaGemm)
