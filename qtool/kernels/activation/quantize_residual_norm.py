"""``qtool::quantize_residual_norm``: a block's residual addition, RMSNorm and quantization at once.

    added = x + residual        codes, scale, sum of RMSNorm(x + residual) * norm

The norm sees the float32 sum, as vLLM's ``fused_add_rms_norm`` does; ``added`` is that sum in x's
dtype. The rest is as in :mod:`~qtool.kernels.activation.quantize_activation`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.kernels.activation.quantize_activation import (
    IN_REGISTERS,
    QuantizeActivation,
    RowPlan,
    definition,
    definitions,
    quantize_activation,
    rms_norm,
)
from qtool.kernels.allocate import new_empty
from qtool.kernels.build import Build
from qtool.kernels.checks import require_tensors
from qtool.kernels.launch import pointers
from qtool.kernels.op import Launch, operator

OP, FUSION = "quantize_residual_norm", "residual-norm"


class QuantizeResidualNorm(NamedTuple):
    """Codes int8 ``[M, K]``, scales float32 ``[M]``, sums int32 ``[M]``, and ``x + residual``.

    ``order``, ``norm`` and ``epsilon`` are those of
    :func:`~qtool.kernels.activation.quantize_activation.quantize_activation`.

    Args:
        x: ``[M, K]``, float32, float16 or bfloat16.
        residual: ``[M, K]`` in the dtype of ``x``.

    Raises:
        QtoolError: for a wrong dtype, shape, stride or device; one sentence.
    """

    x: Tensor
    residual: Tensor
    order: Tensor | None
    norm: Tensor
    epsilon: float

    @property
    def alone(self) -> QuantizeActivation:
        """The same without a residual."""
        return QuantizeActivation(self.x, self.order, self.norm, "rms-norm", self.epsilon)

    def require(self) -> None:
        self.alone.require(OP)
        shape = (self.x.shape[0], self.x.shape[1])
        require_tensors(OP, self.x.device, {"residual": (self.residual, shape, (self.x.dtype,))})

    def empty(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        m, k = self.x.shape
        return *self.alone.empty(), new_empty(self.x, (m, k), self.x.dtype)

    def reference(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = self.x.float() + self.residual.float()
        y = rms_norm(wide, self.norm, self.epsilon)
        return *quantize_activation(y, self.order, None, "none", 0.0), wide.to(self.x.dtype)

    def plan(self) -> Launch:
        order, k, device = self.order, self.x.shape[1], self.x.device
        sources = definitions(k, self.x.dtype, FUSION, order is not None, False, device)
        rows = RowPlan(sources, (order, self.norm), k, self.epsilon, device)

        def launch(call: QuantizeResidualNorm, out: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
            *quantized, added = out
            stream = pointers(call.residual, added)
            rows.launch(call.x.shape[0], *pointers(call.x, *quantized), residual=stream)

        return launch


quantize_residual_norm = operator(OP, QuantizeResidualNorm, rows=("x", "residual"))


def builds() -> Iterator[Build]:
    """A short and a long row, with an order and without, on Hopper; on others a common row."""
    for arch, k, gather in (
        ("sm_80", 4096, False),
        ("sm_89", 4096, False),
        ("sm_90a", 64, True),
        ("sm_90a", 4096, False),
        ("sm_90a", IN_REGISTERS, False),
    ):
        source = definition(k, torch.bfloat16, FUSION, gather)
        yield Build(f"{OP} K={k}", arch, source, source[2]["THREADS"], calls=True)
