"""``qtool::quantize_expert_rows``: codes of tokens that are sorted by expert.

As :mod:`qtool.kernels.activation.quantize_activation`, but a token's codes go to the rows that it
has with its experts, and rows that no expert has are neither read nor written.
"""

import struct
from collections.abc import Iterator
from itertools import product
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.kernels.activation.quantize_activation import RowPlan, definition
from qtool.kernels.build import Build, Source
from qtool.kernels.experts.rows import FUSIONS, ExpertRows
from qtool.kernels.hopper.gemm import require_hopper
from qtool.kernels.launch import pointers
from qtool.kernels.op import operator

#: what the kernel of csrc/activation/quantize_activation.cu reads beyond the others' parameters
ROWS = struct.Struct("<2Qi4x")


class QuantizeExpertRows(NamedTuple):
    """Codes int8 ``[P, K]``, scales float32 ``[P]`` and sums of the codes int32 ``[P]``.

    Args:
        x, place, expert_offsets, fusion: of :class:`~qtool.kernels.experts.rows.ExpertRows`.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    x: Tensor
    place: Tensor | None
    expert_offsets: Tensor
    fusion: str

    @property
    def rows(self) -> ExpertRows:
        return ExpertRows(*self)

    def require(self) -> None:
        self.rows.require("quantize_expert_rows")

    def empty(self) -> tuple[Tensor, Tensor, Tensor]:
        rows = self.rows
        return (
            rows.empty(rows.quantized.k, dtype=torch.int8),
            rows.empty(dtype=torch.float32),
            rows.empty(dtype=torch.int32),
        )

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        codes, scale, token_sum = map(self.rows.placed, self.rows.quantized.reference())
        return codes, scale, token_sum

    def launch(self, out: tuple[Tensor, Tensor, Tensor]) -> None:
        x, k = self.x, out[0].shape[1]
        require_hopper(x.device)
        sources = [(inf, sorted_definition(k, x.dtype, self.fusion))]
        plan = RowPlan(sources, (None, None), k, 0.0, x.device)
        more = ROWS.pack(*self.rows.pointers(), self.rows.top)
        plan.launch(len(x), *pointers(x, *out), more=more)


quantize_expert_rows = operator("quantize_expert_rows", QuantizeExpertRows)


def sorted_definition(k: int, dtype: torch.dtype, fusion: str) -> Source:
    """Source name, prologue and macros of one kernel."""
    name, prologue, defines = definition(k, dtype, fusion, gather=False)
    return name, prologue, defines | {"SORTED": 1}


def builds() -> Iterator[Build]:
    """Each fusion at a short and a long row."""
    for fusion, k in product(FUSIONS, (64, 4096)):
        source = sorted_definition(k, torch.bfloat16, fusion)
        name = f"quantize_expert_rows {fusion} K={k}"
        yield Build(name, "sm_90a", source, source[2]["THREADS"], calls=True)
