"""W4A16 by Hopper's wgmma, behind ``qtool::w4a16_gemm`` (:mod:`qtool.kernels.mma.w4a16`).

In tiles of up to :data:`EXACT_TOKENS` tokens a group's exact products are summed, and the sum is
scaled in float32. Beyond, each weight of a group is scaled and rounded to the tokens' dtype, as
MARLIN and every dequantized checkpoint round it; if the scales have another dtype than the tokens,
sums are scaled there too. Whole channels are scaled after the sum, and no weight is rounded.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from qtool.kernels.build import Build
from qtool.kernels.hopper import gemm
from qtool.kernels.hopper.gemm import KINDS, Operand, Weight
from qtool.kernels.hopper.tiles import TABLE_HALF, Tile, choose_half

EXACT_TOKENS = 32
#: by the dtype of the tokens
INSTRUCTIONS = {torch.float16: "HGMMA.64x{}x16.F32", torch.bfloat16: "HGMMA.64x{}x16.F32.BF16"}


def operand(group: int, x: torch.dtype, scale: torch.dtype, tokens: int) -> Operand:
    """The kernel's operand for a tile of ``tokens``.

    Args:
        group: input channels a scale; 0 where it is the whole channel's.
        x, scale: dtypes of the tokens and the scales.
    """
    step = 64 if tokens > 128 else 128  # input channels of a stage: else two of them fill the ring
    defines = (
        ("GROUP", group),
        ("KIND", KINDS[x]),
        ("SCALE", KINDS[scale]),
        ("EXACT_TOKENS", EXACT_TOKENS),
        ("STEP", step),
    )
    scales = max(1, step // group) * 128 * scale.itemsize if group else 0
    stage_bytes, box = 64 * step + scales, (step // 16, 512)
    return Operand("hopper/w4a16_gemm", defines, stage_bytes, 2 * step - 128, 2, box)


def rounds(tokens: int, group: int, x: torch.dtype, scale: torch.dtype) -> bool:
    """Whether a tile of ``tokens`` multiplies weights that are rounded to ``x``."""
    return group > 0 and scale == x and tokens > EXACT_TOKENS


def builds() -> Iterator[Build]:
    """Groups of 128 with all tiles, other groups and dtypes with a wide and a narrow one."""
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    ends, ends_of_sums = (Tile(32, split=8), Tile(256)), (Tile(32, split=8), Tile(128))
    for group, x, scale, tiles in (
        (128, bf16, bf16, TABLE_HALF),
        (64, f16, f16, ends),
        (32, bf16, bf16, ends),
        (0, f16, bf16, ends),
        (128, bf16, f32, ends_of_sums),
        (64, bf16, f16, ends_of_sums),
        (32, f16, f32, ends_of_sums),
    ):
        for tile in dict.fromkeys(tiles):
            kernel = operand(group, x, scale, tile.tokens)
            yield from gemm.builds(f"w4a16 g{group} {x} {scale}", kernel, (tile,), INSTRUCTIONS[x])


def packed_weight(qweight: Tensor, scale: Tensor) -> Weight:
    """The op's tensors as the kernel takes them, unchecked."""
    return Weight(scale, boxed=qweight.view(torch.uint8))


def run(x: Tensor, qweight: Tensor, scale: Tensor, out: Tensor, bias: Tensor | None) -> None:
    """Launch ``out [M, N] = x [M, K] W^T``. All checks were made by the op."""
    (m, k), n = x.shape, out.shape[1]
    group = 0 if len(scale) == 1 else k // len(scale)
    tile = choose_half(m, n, k, scales_sums=group > 0 and scale.dtype != x.dtype)
    kernel = operand(group, x.dtype, scale.dtype, tile.tokens)
    gemm.run(kernel, tile, x, None, packed_weight(qweight, scale), out, bias=bias)
