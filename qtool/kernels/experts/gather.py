"""``qtool::gather_expert_rows``: tokens sorted by expert, for GEMMs that take them in 16 bits.

A token, or ``SiLU(gate) * up`` of it rounded where the model rounds it, is copied to its row of
each of its experts; either may be rotated. Rows that belong to no expert are neither read nor
written.
"""

import struct
from collections.abc import Iterator
from functools import cache
from itertools import product

import torch
from torch import Tensor

from qtool.kernels.activation.quantize_activation import ROW_SOURCES
from qtool.kernels.build import Build, Source, cubin
from qtool.kernels.dtypes import NUMBERS
from qtool.kernels.experts.rows import FUSIONS, ExpertRows
from qtool.kernels.hopper.gemm import require_hopper
from qtool.kernels.launch import launch, load, pointers
from qtool.kernels.op import operator
from qtool.schemes.arithmetic.online_hadamard import rotate

SOURCE = "experts/gather_expert_rows"
THREADS = 128
#: csrc/experts/gather_expert_rows.cu, whose tokens are an ``Input`` of x alone
PARAMETERS = struct.Struct("<Q32x3Q2i")


class GatherExpertRows(ExpertRows):
    """The sorted tokens ``[P, K]`` in x's dtype.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or GPU; one sentence.
    """

    def require(self) -> None:
        self.require_rows("gather_expert_rows")

    def empty(self) -> Tensor:
        return self.new_rows(self.quantized.k, dtype=self.x.dtype)

    def reference(self) -> Tensor:
        y = self.quantized.read()
        return self.placed(rotate(y).to(y.dtype) if self.rotated else y)

    def launch(self, out: Tensor) -> None:
        device, k = self.x.device, out.shape[1]
        require_hopper(device)
        if len(out):
            how = (k, self.x.dtype, self.fusion, self.rotated)
            addresses = *pointers(self.x, out), *self.pointers()
            parameters = PARAMETERS.pack(*addresses, k, self.top)
            grid = len(self.x) * definition(*how)[2]["CLUSTER"]
            kernel = _kernel(*how, device.index)
            launch(kernel, grid, THREADS, 0, parameters, device, overlap=True)


gather_expert_rows = operator("gather_expert_rows", GatherExpertRows)


def definition(k: int, dtype: torch.dtype, fusion: str, rotated: bool) -> Source:
    """Source name, prologue and macros of one kernel: eight values a thread."""
    defines = {"DTYPE": NUMBERS[dtype], "FUSION": ROW_SOURCES[fusion]}
    defines |= {"GATHER": 0, "ROTATE": int(rotated)}
    return SOURCE, "", defines | {"THREADS": THREADS, "PIECES": 1, "CLUSTER": -(-k // 8 // THREADS)}


@cache
def _kernel(k: int, dtype: torch.dtype, fusion: str, rotated: bool, device: int) -> int:
    source = definition(k, dtype, fusion, rotated)
    return load(cubin(*source, "sm_90a"), "gather_expert_rows", 0, device)


def builds() -> Iterator[Build]:
    """Each fusion, by its own block and by several, rotated and not."""
    for fusion, k, rotated in product(FUSIONS, (64, 4096), (False, True)):
        source = definition(k, torch.bfloat16, fusion, rotated)
        name = f"gather_expert_rows {fusion} K={k}" + " rotated" * rotated
        yield Build(name, "sm_90a", source, 4 * THREADS, calls=True)
