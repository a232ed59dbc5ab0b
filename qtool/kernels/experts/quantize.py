"""``qtool::quantize_expert_rows``: codes of tokens that are sorted by expert.

It quantizes as :mod:`qtool.kernels.activation.quantize_activation`, but writes a token's codes to
its row of each of its experts. Rows that belong to no expert are neither read nor written.
"""

import struct
from collections.abc import Iterator
from itertools import product
from math import inf

import torch
from torch import Tensor

from qtool.kernels.activation.quantize_activation import RowPlan, definition
from qtool.kernels.build import Build, Source
from qtool.kernels.experts.rows import FUSIONS, ExpertRows
from qtool.kernels.hopper.gemm import require_hopper
from qtool.kernels.launch import pointers
from qtool.kernels.op import operator

#: parameters of the kernel in csrc/activation/quantize_activation.cu beyond the common ones
ROWS = struct.Struct("<2Qi4x")


class QuantizeExpertRows(ExpertRows):
    """Codes int8 ``[P, K]``, scales float32 ``[P]`` and sums of the codes int32 ``[P]``.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    def require(self) -> None:
        self.require_rows("quantize_expert_rows")

    def empty(self) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.new_rows(self.quantized.k, dtype=torch.int8),
            self.new_rows(dtype=torch.float32),
            self.new_rows(dtype=torch.int32),
        )

    def reference(self) -> tuple[Tensor, Tensor, Tensor]:
        codes, scale, token_sum = map(self.placed, self.quantized.reference())
        return codes, scale, token_sum

    def launch(self, out: tuple[Tensor, Tensor, Tensor]) -> None:
        x, k = self.x, out[0].shape[1]
        require_hopper(x.device)
        sources = [(inf, sorted_definition(k, x.dtype, self.fusion, self.rotated))]
        plan = RowPlan(sources, (None, None), k, 0.0, x.device)
        more = ROWS.pack(*self.pointers(), self.top)
        plan.launch(len(x), *pointers(x, *out), more=more)


quantize_expert_rows = operator("quantize_expert_rows", QuantizeExpertRows)


def sorted_definition(k: int, dtype: torch.dtype, fusion: str, rotated: bool) -> Source:
    """Source name, prologue and macros of one kernel."""
    name, prologue, defines = definition(k, dtype, fusion, False, rotated)
    return name, prologue, defines | {"SORTED": 1}


def builds() -> Iterator[Build]:
    """Each fusion at a short and a long row, rotated and not."""
    for fusion, k, rotated in product(FUSIONS, (64, 4096), (False, True)):
        source = sorted_definition(k, torch.bfloat16, fusion, rotated)
        name = f"quantize_expert_rows {fusion} K={k}" + " rotated" * rotated
        yield Build(name, "sm_90a", source, source[2]["THREADS"], calls=True)
