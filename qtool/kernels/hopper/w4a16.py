"""W4A16 by Hopper's wgmma, dense and 2:4 sparse, behind the ops of :mod:`qtool.kernels.mma.w4a16`.

In tiles of up to :data:`EXACT_TOKENS` tokens a group's exact products are summed, and the sum is
scaled in float32. In wider tiles each weight of a group is scaled and rounded to the tokens' dtype,
as in MARLIN and in every dequantized checkpoint; if the scales have another dtype than the tokens,
sums are scaled in these tiles too. A scale per channel is applied after the sum, and no weight is
rounded.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product

import torch
from torch import Tensor

from qtool.kernels.build import Build
from qtool.kernels.dtypes import NUMBERS
from qtool.kernels.hopper import gemm
from qtool.kernels.hopper.gemm import Operand, Plan, Weight
from qtool.kernels.hopper.tiles import TABLE_HALF, Tile, choose_half
from qtool.kernels.mma.half_gemm import HalfWeight

EXACT_TOKENS = 32
#: wgmma in the machine code, by the dtype of the tokens; the second table is for 2:4 sparse weights
INSTRUCTIONS = {torch.float16: "HGMMA.64x{}x16.F32", torch.bfloat16: "HGMMA.64x{}x16.F32.BF16"}
INSTRUCTIONS_24 = {x: name.replace("64x{}x16", "SP.64x{}x32") for x, name in INSTRUCTIONS.items()}


@cache
def operand(
    group: int, x: torch.dtype, scale: torch.dtype, tokens: int, *, sparse: bool = False
) -> Operand:
    """The kernel's operand for a tile of ``tokens``.

    Args:
        group: input channels per scale; 0 if there is one scale for an output channel.
        x: dtype of the tokens.
        scale: dtype of the scales.
        sparse: the weight is 2:4 sparse, in layout marlin-24.
    """
    step = 64 if tokens > 128 else 128  # input channels of a stage; two of 128 fill the ring
    defines = (
        ("GROUP", group),
        ("KIND", NUMBERS[x]),
        ("SCALE", NUMBERS[scale]),
        ("EXACT_TOKENS", EXACT_TOKENS),
        ("STEP", step),
    )
    scales = max(1, step // group) * 128 * scale.itemsize if group else 0
    # codes of 16 inputs lie together, of 2:4 sparse weights 32 inputs' kept ones, and half as many
    # bytes of positions
    inputs, bytes_an_input, name = (32, 48, "w4a16_24") if sparse else (16, 64, "w4a16")
    stage_bytes, box = bytes_an_input * step + scales, (step // inputs, 512)
    return Operand(f"hopper/{name}_gemm", defines, stage_bytes, 2 * step - 128, 2, box)


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
        for tile, sparse in product(dict.fromkeys(tiles), (False, True)):
            kernel = operand(group, x, scale, tile.tokens, sparse=sparse)
            name = "w4a16-24" if sparse else "w4a16"
            instruction = (INSTRUCTIONS_24 if sparse else INSTRUCTIONS)[x]
            yield from gemm.builds(f"{name} g{group} {x} {scale}", kernel, (tile,), instruction)


def packed_weight(weight: HalfWeight) -> Weight:
    """The op's tensors as the kernel takes them, unchecked."""
    positions = None if weight.metadata is None else weight.metadata.view(torch.uint8)
    return Weight(weight.scale, boxed=weight.qweight.view(torch.uint8), positions=positions)


def plan(x: torch.dtype, weight: HalfWeight, bias: Tensor | None, out_dtype: torch.dtype) -> Plan:
    """The launches for tokens of dtype ``x``; the op made all checks."""
    (n, k), sparse = weight.shape, weight.metadata is not None
    kind = weight.group, x, weight.scale.dtype
    scales_sums = weight.group > 0 and weight.scale.dtype != x

    def choose(m: int) -> tuple[Operand, Tile]:
        tile = choose_half(m, n, k, scales_sums=scales_sums, sparse=sparse)
        return operand(*kind, tile.tokens, sparse=sparse), tile

    return Plan(choose, packed_weight(weight), bias, (n, k), out_dtype)
