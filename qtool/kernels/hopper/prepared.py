"""A linear with 8-bit activations as two launches: its input is quantized, then multiplied.

The ops ``qtool::quantize_activation`` and ``qtool::w4a8_gemm`` or ``qtool::w8a8_gemm`` do the same
behind torch's dispatcher, with every argument checked. Here the checks are made once a layer, and a
call packs two blocks of parameters, allocates two tensors and launches.
"""

import torch
from torch import Tensor

from qtool.kernels.activation.quantize_activation import RowPlan, definition
from qtool.kernels.hopper.gemm import Operand, Plan, Weight
from qtool.kernels.hopper.tiles import choose

#: numbers of tokens whose plans are kept; a server's batches and a prompt's lengths fit
MOST_PLANS = 256
ALIGNMENT = 128


class PreparedLinear:
    """``Y [M, N]`` of ``out_dtype`` for inputs ``[M, K]`` of ``dtype``, contiguous and on the
    weight's device.

    Args:
        shape: N and K.
        order: int32 ``[K]``, the input channel of each code, or None.
    """

    def __init__(
        self,
        operand: Operand,
        weight: Weight,
        bias: Tensor | None,
        order: Tensor | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        out_dtype: torch.dtype,
    ) -> None:
        self.operand, self.weight, self.bias, self.out_dtype = operand, weight, bias, out_dtype
        (self.n, self.k), self.device = shape, weight.scale1.device
        source = definition(self.k, dtype, "none", order is not None)
        self.rows = RowPlan(source, (order, None), self.k, 0.0, self.device)
        self.plans: dict[int, tuple[Plan, int, int]] = {}

    def __call__(self, x: Tensor) -> Tensor:
        m = len(x)
        out = torch.empty((m, self.n), dtype=self.out_dtype, device=self.device)
        if m == 0:
            return out
        plan, scale_bytes, size = self.plans.get(m) or self._plan(m)
        codes = torch.empty(size, dtype=torch.uint8, device=self.device)  # scales and sums too
        address = codes.data_ptr()
        scale = address + m * self.k
        token_sum = scale + scale_bytes
        self.rows.launch(m, x.data_ptr(), address, scale, token_sum)
        plan.launch(address, scale, token_sum, out.data_ptr())
        return out

    def _plan(self, m: int) -> tuple[Plan, int, int]:
        """The GEMM for ``m`` tokens, the bytes of their scales, and of everything that is
        quantized.
        """
        if len(self.plans) >= MOST_PLANS:
            self.plans.clear()
        tile, shape = choose(m, self.n, self.k), (m, self.n, self.k)
        plan = Plan(self.operand, tile, self.weight, self.bias, shape, self.out_dtype)
        scale_bytes = -(-4 * m // ALIGNMENT) * ALIGNMENT
        self.plans[m] = plan, scale_bytes, m * self.k + 2 * scale_bytes
        return self.plans[m]
