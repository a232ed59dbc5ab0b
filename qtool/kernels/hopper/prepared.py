"""A linear with 8-bit activations as two launches: one quantizes its input, one multiplies.

The ops ``qtool::quantize_activation`` and ``qtool::w4a8_gemm`` or ``qtool::w8a8_gemm`` do the same
behind torch's dispatcher, with every argument checked. Here the checks are made once per layer, and
a call packs two blocks of parameters, allocates two tensors and launches.
"""

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.activation.quantize_activation import RowPlan, definitions
from qtool.kernels.allocate import inductor
from qtool.kernels.hopper.gemm import Operand, Plan, Weight
from qtool.kernels.hopper.tiles import choose

#: shapes of inputs whose buffers are kept; a server's batches and a prompt's lengths fit
MOST_SHAPES = 256
#: the bytes for scales are a multiple of it, so that sums begin as aligned as scales
ALIGNMENT = 128


class Buffers(NamedTuple):
    """The buffers of one input shape.

    ``m`` is the number of tokens, ``shape`` and ``stride`` are those of the output. One buffer of
    ``size`` bytes holds the quantized input, with scales at byte ``scale`` and sums at byte
    ``token_sum``.
    """

    m: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    scale: int
    token_sum: int
    size: int


class PreparedLinear:
    """``Y [..., N]`` of ``out_dtype`` for inputs ``[..., K]`` of ``dtype``.

    Inputs are contiguous and on the weight's device.

    Args:
        shape: N and K.
        order: int32 ``[K]``, the input channel of each code, or None.
        norm: weight ``[K]`` and epsilon of an RMSNorm that the input goes through first, or None
            and 0.
        rotated: whether the input is then rotated.
    """

    def __init__(
        self,
        operand: Operand,
        weight: Weight,
        bias: Tensor | None,
        order: Tensor | None,
        norm: tuple[Tensor | None, float],
        shape: tuple[int, int],
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        *,
        rotated: bool,
    ) -> None:
        self.n, self.k = n, k = shape
        self.device = weight.scale1.device
        self.out_dtype = out_dtype
        self.gemm = Plan(lambda m: (operand, choose(m, n, k)), weight, bias, shape, out_dtype)
        weight_of_norm, epsilon = norm
        self.tensors = weight, bias, order, weight_of_norm  # the plans keep their addresses alone
        fusion = "none" if weight_of_norm is None else "rms-norm"
        sources = definitions(self.k, dtype, fusion, order is not None, rotated, self.device)
        self.rows = RowPlan(sources, (order, weight_of_norm), self.k, epsilon, self.device)
        self.buffers: dict[torch.Size, Buffers] = {}
        on_gpu = self.device.type == "cuda"
        self.index = self.device.index if on_gpu else -1
        self.empty = inductor._empty_strided_cuda if on_gpu else inductor._empty_strided_cpu

    def __call__(self, x: Tensor) -> Tensor:
        if x.get_device() != self.index:
            raise QtoolError(
                f"the weight is on {self.device}, x on {x.device}; both must be on one"
            )
        if x.is_cuda and torch._C._cuda_getDevice() != self.index:
            with torch.cuda.device(self.device):
                return self(x)
        tokens = x.data_ptr()
        if tokens % 16:  # as many bytes are read at once; one row of a slice may begin anywhere
            return self(x.clone())
        own = self.buffers.get(x.shape) or self._buffers(x)
        out = self.empty(own.shape, own.stride, self.out_dtype)
        if own.m == 0:
            return out
        codes = self.empty((own.size,), (1,), torch.uint8)  # scales and sums too
        address = codes.data_ptr()
        scale, token_sum = address + own.scale, address + own.token_sum
        self.rows.launch(own.m, tokens, address, scale, token_sum)
        self.gemm.launch(own.m, address, scale, token_sum, out.data_ptr())
        return out

    def _buffers(self, x: Tensor) -> Buffers:
        """The buffers for inputs of ``x``'s shape."""
        if x.shape[-1] != self.k:
            raise QtoolError(f"x is {tuple(x.shape)}; expected {self.k} input channels at the end")
        if len(self.buffers) >= MOST_SHAPES:
            self.buffers.clear()
        shape = (*x.shape[:-1], self.n)
        m = prod(shape[:-1])
        stride = tuple(prod(shape[at + 1 :]) for at in range(len(shape)))
        scale_bytes = -(-4 * m // ALIGNMENT) * ALIGNMENT
        token_sum = m * self.k + scale_bytes
        buffers = Buffers(m, shape, stride, m * self.k, token_sum, token_sum + scale_bytes)
        self.buffers[x.shape] = buffers
        return buffers
