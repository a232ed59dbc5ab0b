"""``qtool::w4a16_experts_gemm``: :func:`w4a16_gemm` for each expert's tokens, in one launch.

It uses Hopper's wgmma for any number of tokens. :mod:`qtool.kernels.hopper.w4a16` says which tiles
round the weights of groups.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import Build
from qtool.kernels.experts.grouped import experts_operand, products, require_experts
from qtool.kernels.experts.tiles import TABLE_HALF, TABLE_HALF_SUMS, choose_experts
from qtool.kernels.hopper import gemm, w4a16
from qtool.kernels.hopper.gemm import Operand, Weight, run
from qtool.kernels.hopper.tiles import Tile
from qtool.kernels.mma.w4a16 import W4A16Gemm
from qtool.kernels.op import operator


def operand(group: int, x: torch.dtype, scale: torch.dtype, tokens: int) -> Operand:
    """The operand for a tile of ``tokens``, as :func:`qtool.kernels.hopper.w4a16.operand`."""
    return experts_operand(w4a16.operand(group, x, scale, tokens))


def choose(
    rows: int, experts: int, n: int, k: int, group: int, x: torch.dtype, scale: torch.dtype
) -> Tile:
    """The tile for ``rows`` tokens of ``experts``, each of whose weights is ``[n, k]``."""
    stage_bytes = operand(group, x, scale, 128).stage_bytes
    scales_sums = group > 0 and scale != x
    return choose_experts(rows, experts, n, k, stage_bytes, half=True, scales_sums=scales_sums)


def builds() -> Iterator[Build]:
    """Groups of 128 with every width, the others with the widest and the narrowest."""
    f16, bf16, f32 = torch.float16, torch.bfloat16, torch.float32
    ends = (Tile(8, split=2, blocks_per_sm=2), Tile(256))
    for group, x, scale, tiles in (
        (128, bf16, bf16, TABLE_HALF),
        (128, bf16, f32, TABLE_HALF_SUMS),
        (32, f16, f16, ends),
        (0, bf16, f16, ends),
    ):
        name = f"w4a16 g{group} {x} {scale} experts"
        for tokens in dict.fromkeys(tile.tokens for tile in tiles):
            same = [tile for tile in tiles if tile.tokens == tokens]
            kernel = operand(group, x, scale, tokens)
            yield from gemm.builds(name, kernel, same, w4a16.INSTRUCTIONS[x])


class W4A16ExpertsGemm(NamedTuple):
    """``Y [P, N]``: rows ``expert_offsets[e]`` to ``expert_offsets[e + 1]`` by expert e's weight.

    Rows beyond the last expert's are not written.

    Args:
        x: float16 or bfloat16 ``[P, K]``, sorted by expert.
        expert_offsets: int32 ``[E + 1]``, as :func:`route_experts` gives them.
        qweight: ``[E, J, K/16, 2 N/J]``: an expert's weight is J weights of :func:`w4a16_gemm`,
            whose outputs are concatenated.
        scale: ``[E, J, G, N/J]``, of those J parts.
        out_dtype: as :func:`w4a16_gemm` takes it.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    x: Tensor
    expert_offsets: Tensor
    qweight: Tensor
    scale: Tensor
    out_dtype: torch.dtype

    @property
    def stacks(self) -> tuple[Tensor, Tensor]:
        return self.qweight, self.scale

    @property
    def first(self) -> W4A16Gemm:
        """The product of all rows and the first part; all parts have the same shapes."""
        return W4A16Gemm(self.x, self.qweight[0, 0], self.scale[0, 0], None, self.out_dtype)

    def dense(self, rows: slice, stacks: tuple[Tensor | None, ...]) -> W4A16Gemm:
        """The product of some rows and one weight, its parts side by side."""
        qweight, scale = (torch.cat(stack.unbind(), 1) for stack in stacks if stack is not None)
        return W4A16Gemm(self.x[rows], qweight, scale, None, self.out_dtype)

    def require(self) -> None:
        op, (qweight, scale) = "w4a16_experts_gemm", self.stacks
        require_experts(op, self.x, self.expert_offsets, self.stacks)
        if not qweight.dim() == scale.dim() == 4 or not 0 < qweight.shape[1] == scale.shape[1]:
            raise QtoolError(
                f"{op}: qweight has shape {tuple(qweight.shape)} and scale {tuple(scale.shape)}; "
                "expected [E, J, K/16, 2 N/J] and [E, J, G, N/J]"
            )
        self.first.require(op)

    def empty(self) -> Tensor:
        n = self.qweight.shape[1] * self.qweight.shape[3] // 2
        return self.x.new_empty((self.x.shape[0], n), dtype=self.out_dtype)

    def reference(self) -> Tensor:
        return products(self.empty(), self.expert_offsets, self.stacks, self.dense)

    def launch(self, out: Tensor) -> None:
        if len(out):
            part, dtypes = self.first.weight, (self.x.dtype, self.scale.dtype)
            sizes = (len(out), len(self.qweight), out.shape[1], self.x.shape[1])
            tile = choose(*sizes, part.group, *dtypes)
            kernel = operand(part.group, *dtypes, tile.tokens)
            codes = self.qweight.view(torch.uint8).flatten(0, 2)
            weight = Weight(self.scale, boxed=codes, part=part.shape[0])
            run(kernel, tile, self.x, None, weight, out, offsets=self.expert_offsets)


w4a16_experts_gemm = operator("w4a16_experts_gemm", W4A16ExpertsGemm)
