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

    @triton.jit(do_not_specialize=["groups"])
    def _fake(  # type: ignore[no-untyped-def]
        x_ptr, out_ptr, top, size, groups, tiny, BY_GROUP: tl.constexpr, SIZE: tl.constexpr
    ):
        column = tl.arange(0, SIZE)
        largest = tl.load(top + tl.program_id(0) % groups).to(tl.float32) if BY_GROUP else top
        at = tl.program_id(0).to(tl.int64) * size + column
        x = tl.load(x_ptr + at, column < size, 0.0).to(tl.float32)
        amax = tl.max(tl.abs(x), 0)
        scale = tl.maximum(tl.where(amax > 0, tl.div_rn(amax, largest), 1.0), tiny)
        code = (tl.div_rn(x, scale) + MAGIC) - MAGIC
        tl.store(out_ptr + at, code * scale, column < size)


def runs_on(x: Tensor, size: int) -> bool:
    """Whether the fused kernel can take rows of ``size`` channels."""
    return size <= LARGEST_ROW and triton_runs_on(x)


def fake(x: Tensor, size: int, top: Tensor | int) -> Tensor:
    """``x [..., K]`` quantized and dequantized, in its own dtype.

    Codes are symmetric up to ``top``, which may differ by group (``[G]``), with one scale per
    ``size`` channels.
    """
    x = x.contiguous()
    out = torch.empty_like(x)
    block = triton.next_power_of_2(size)
    warps = min(16, max(1, block // 512))
    tops = top.contiguous() if isinstance(top, Tensor) else float(top)
    sizes = size, x.shape[-1] // size, torch.finfo(torch.float32).tiny
    options = {"BY_GROUP": isinstance(top, Tensor), "SIZE": block, "num_warps": warps}
    launch(_fake, (x.numel() // size,), x, out, tops, *sizes, **options)
    return out
