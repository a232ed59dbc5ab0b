"""Quantizes and dequantizes activations on a GPU in one pass over each row.

The numbers are those of ``Activation.dequantize(*Activation.quantize(x))`` to the bit.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from qtool.schemes.arithmetic.launch_triton import launch, triton_runs_on

#: channels of a row that one program holds in registers
LARGEST_ROW = 32768

if find_spec("triton"):
    import triton
    import triton.language as tl

    from qtool.schemes.arithmetic.round_triton import MAGIC

    @triton.jit
    def _fake(x_ptr, out_ptr, size, top, tiny, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
        column = tl.arange(0, SIZE)
        at = tl.program_id(0).to(tl.int64) * size + column
        x = tl.load(x_ptr + at, column < size, 0.0).to(tl.float32)
        amax = tl.max(tl.abs(x), 0)
        scale = tl.maximum(tl.where(amax > 0, tl.div_rn(amax, top), 1.0), tiny)
        code = (tl.div_rn(x, scale) + MAGIC) - MAGIC
        tl.store(out_ptr + at, code * scale, column < size)


def runs_on(x: Tensor, size: int) -> bool:
    """Whether the fused kernel can take rows of ``size`` channels."""
    return size <= LARGEST_ROW and triton_runs_on(x)


def fake(x: Tensor, size: int, top: int) -> Tensor:
    """``x [..., K]`` quantized and dequantized, in its own dtype.

    Codes are symmetric up to ``top``, with one scale per ``size`` channels.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 512))
    tiny = torch.finfo(torch.float32).tiny
    launch(_fake, (x.numel() // size,), x, out, size, float(top), tiny, SIZE=block, num_warps=warps)
    return out
