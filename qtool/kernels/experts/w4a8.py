"""``qtool::w4a8_experts_gemm``: :func:`w4a8_gemm` for each expert's tokens, in one launch."""

from collections.abc import Iterator
from types import EllipsisType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtool.kernels.build import Build
from qtool.kernels.experts.grouped import experts_operand, products, require_experts
from qtool.kernels.experts.tiles import TABLE, choose_experts
from qtool.kernels.hopper import gemm, w4a8
from qtool.kernels.hopper.gemm import Operand, run
from qtool.kernels.hopper.tiles import Tile
from qtool.kernels.hopper.w4a8 import W4A8Gemm, packed_weight
from qtool.kernels.op import operator


def operand(scheme: str, group_size: int | None) -> Operand:
    """The operand of a scheme's kernel."""
    return experts_operand(w4a8.operand(scheme, group_size))


def builds() -> Iterator[Build]:
    """LiquidQuant g64 with every tile, the others with the widest and the narrowest."""
    yield from gemm.builds("w4a8-lqq g64 experts", operand("w4a8-lqq", 64), TABLE)
    for scheme, group in (("w4a8-lqq", 128), ("w4a8-qoq-g128", 128), ("w4a8-qoq", None)):
        tiles = (Tile(256), Tile(8, split=2, blocks_per_sm=2))
        yield from gemm.builds(f"{scheme} g{group} experts", operand(scheme, group), tiles)


class W4A8ExpertsGemm(NamedTuple):
    """``Y [P, N]``: rows ``expert_offsets[e]`` to ``expert_offsets[e + 1]`` by expert e's weight.

    Rows beyond the last expert's are not written. ``qweight``, ``s1``, ``s2``, ``offset`` and
    ``zero`` are those of E calls of :func:`w4a8_gemm`, stacked; ``scheme``, ``group_size`` and
    ``out_dtype`` are as there.

    Args:
        x: codes int8 ``[P, K]``, sorted by expert.
        sx: scales of the tokens ``[P]``.
        expert_offsets: int32 ``[E + 1]``, as :func:`route_experts` gives them.
        token_sum: sums of the tokens' codes ``[P]``.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device, scheme or GPU; one sentence.
    """

    x: Tensor
    sx: Tensor
    expert_offsets: Tensor
    qweight: Tensor
    s1: Tensor
    s2: Tensor | None
    offset: Tensor | None
    zero: Tensor | None
    token_sum: Tensor
    scheme: str
    group_size: int | None
    out_dtype: torch.dtype

    @property
    def stacks(self) -> tuple[Tensor | None, ...]:
        return self.qweight, self.s1, self.s2, self.offset, self.zero

    def dense(self, rows: slice | EllipsisType, stacks: tuple[Tensor | None, ...]) -> W4A8Gemm:
        """The product of some rows and one weight."""
        qweight, s1, s2, offset, zero = stacks
        assert qweight is not None and s1 is not None
        weight = (qweight, s1, s2, offset, zero)
        how = (None, self.scheme, self.group_size, self.out_dtype)
        return W4A8Gemm(self.x[rows], self.sx[rows], *weight, self.token_sum[rows], *how)

    def require(self) -> None:
        op, offsets = "w4a8_experts_gemm", self.expert_offsets
        flat = require_experts(op, self.x, offsets, self.stacks)
        self.dense(..., flat).require(op)

    def empty(self) -> Tensor:
        n = self.qweight.shape[1] * 64
        return self.x.new_empty((self.x.shape[0], n), dtype=self.out_dtype)

    def reference(self) -> Tensor:
        return products(self.empty(), self.expert_offsets, self.stacks, self.dense)

    def launch(self, out: Tensor) -> None:
        if len(out):
            flat: Any = [None if stack is None else stack.flatten(0, 1) for stack in self.stacks]
            weight = packed_weight(self.scheme, *flat)
            experts, kernel = len(self.qweight), operand(self.scheme, self.group_size)
            sizes = (out.shape[1], self.x.shape[1], kernel.stage_bytes)
            tile = choose_experts(len(out), experts, *sizes)
            given = (kernel, tile, self.x, self.sx, weight, out)
            run(*given, token_sum=self.token_sum, offsets=self.expert_offsets)


w4a8_experts_gemm = operator("w4a8_experts_gemm", W4A8ExpertsGemm)
