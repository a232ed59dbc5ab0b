"""``qtool::w8a8_experts_gemm``: :func:`w8a8_gemm` for each expert's tokens, in one launch."""

from collections.abc import Iterator
from types import EllipsisType
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.kernels.build import Build
from qtool.kernels.experts.grouped import experts_operand, products, require_experts
from qtool.kernels.experts.tiles import TABLE, choose_experts
from qtool.kernels.hopper import gemm, w8a8
from qtool.kernels.hopper.gemm import Weight, run
from qtool.kernels.hopper.w8a8 import W8A8Gemm
from qtool.kernels.op import operator

OPERAND = experts_operand(w8a8.OPERAND)


def builds() -> Iterator[Build]:
    """Every tile."""
    return gemm.builds("w8a8 experts", OPERAND, TABLE)


class W8A8ExpertsGemm(NamedTuple):
    """``Y [P, N]``: rows ``expert_offsets[e]`` to ``expert_offsets[e + 1]`` by expert e's weight.

    Rows beyond the last expert's are not written.

    Args:
        x: codes int8 ``[P, K]``, sorted by expert.
        sx: scales of the tokens ``[P]``.
        expert_offsets: int32 ``[E + 1]``, as :func:`route_experts` gives them.
        weight: int8 ``[E, N, K]``.
        scale: ``[E, N]``.
        out_dtype: as :func:`w8a8_gemm` takes it.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    x: Tensor
    sx: Tensor
    expert_offsets: Tensor
    weight: Tensor
    scale: Tensor
    out_dtype: torch.dtype

    @property
    def stacks(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.scale

    def dense(self, rows: slice | EllipsisType, stacks: tuple[Tensor | None, ...]) -> W8A8Gemm:
        """The product of some rows and one weight."""
        weight, scale = stacks
        assert weight is not None and scale is not None
        return W8A8Gemm(self.x[rows], self.sx[rows], weight, scale, None, self.out_dtype)

    def require(self) -> None:
        op, offsets = "w8a8_experts_gemm", self.expert_offsets
        self.dense(..., require_experts(op, self.x, offsets, self.stacks)).require(op)

    def empty(self) -> Tensor:
        return self.x.new_empty((self.x.shape[0], self.weight.shape[1]), dtype=self.out_dtype)

    def reference(self) -> Tensor:
        return products(self.empty(), self.expert_offsets, self.stacks, self.dense)

    def launch(self, out: Tensor) -> None:
        if len(out):
            weight = Weight(self.scale.flatten(), boxed=self.weight.flatten(0, 1))
            tile = choose_experts(len(out), *self.weight.shape, OPERAND.stage_bytes)
            given = (OPERAND, tile, self.x, self.sx, weight, out)
            run(*given, offsets=self.expert_offsets)


w8a8_experts_gemm = operator("w8a8_experts_gemm", W8A8ExpertsGemm)
