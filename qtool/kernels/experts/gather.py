"""``qtool::gather_expert_rows``: tokens sorted by expert, for GEMMs that take them in 16 bits.

A token goes to the rows that it has with its experts as it is, or ``SiLU(gate) * up`` of it,
rounded where the model rounds it. Rows that no expert has are neither read nor written.
"""

import struct
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from qtool.kernels.activation.quantize_activation import ROW_SOURCES
from qtool.kernels.build import Build, Source, cubin
from qtool.kernels.dtypes import NUMBERS
from qtool.kernels.experts.rows import FUSIONS, ExpertRows
from qtool.kernels.hopper.gemm import require_hopper
from qtool.kernels.launch import launch, load, pointers
from qtool.kernels.op import operator

SOURCE = "experts/gather_expert_rows"
THREADS = 128
#: csrc/experts/gather_expert_rows.cu, whose tokens are an ``Input`` of x alone
PARAMETERS = struct.Struct("<Q32x3Q2i")


class GatherExpertRows(ExpertRows):
    """``[P, K]`` in x's dtype.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    def require(self) -> None:
        self.require_rows("gather_expert_rows")

    def empty(self) -> Tensor:
        return self.new_rows(self.quantized.k, dtype=self.x.dtype)

    def reference(self) -> Tensor:
        return self.placed(self.quantized.read())

    def launch(self, out: Tensor) -> None:
        device, k = self.x.device, out.shape[1]
        require_hopper(device)
        if len(out):
            source = definition(k, self.x.dtype, self.fusion)
            addresses = *pointers(self.x, out), *self.pointers()
            parameters = PARAMETERS.pack(*addresses, k, self.top)
            grid = len(self.x) * source[2]["CLUSTER"]
            kernel = _kernel(k, self.x.dtype, self.fusion, device.index)
            launch(kernel, grid, THREADS, 0, parameters, device, overlap=True)


gather_expert_rows = operator("gather_expert_rows", GatherExpertRows)


def definition(k: int, dtype: torch.dtype, fusion: str) -> Source:
    """Source name, prologue and macros of one kernel: eight values a thread."""
    defines = {"DTYPE": NUMBERS[dtype], "FUSION": ROW_SOURCES[fusion], "GATHER": 0, "ROTATE": 0}
    return SOURCE, "", defines | {"THREADS": THREADS, "PIECES": 1, "CLUSTER": -(-k // 8 // THREADS)}


@cache
def _kernel(k: int, dtype: torch.dtype, fusion: str, device: int) -> int:
    return load(cubin(*definition(k, dtype, fusion), "sm_90a"), "gather_expert_rows", 0, device)


def builds() -> Iterator[Build]:
    """Each fusion, by its own block and by several."""
    for fusion in FUSIONS:
        for k in (64, 4096):
            source = definition(k, torch.bfloat16, fusion)
            name = f"gather_expert_rows {fusion} K={k}"
            yield Build(name, "sm_90a", source, 4 * THREADS, calls=True)
