"""The gradient of the norms of all groups on a GPU, in one pass over the rows.

The arithmetic is that of ``learned_rotation.to_gradient``, with sums added in another order. It
replaces dozens of kernel launches a step, which take most of the time for a value head.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from qtool.schemes.arithmetic.launch_triton import launch, triton_runs_on

#: elements that one program holds at a time, and the widest group, which one program holds whole
ELEMENTS, WIDEST = 2048, 16384

if find_spec("triton"):
    import triton
    import triton.language as tl

    @triton.jit
    def _norm(x, size, SQUARE: tl.constexpr):  # type: ignore[no-untyped-def]
        """The 16-norm of each row of ``x``, with a mean under the root, and its gradient.

        With SQUARE the gradient is half that of the norm's square.
        """
        top = tl.maximum(tl.max(tl.abs(x), 1), 1e-20)
        share = tl.div_rn(x, top[:, None])
        second = share * share
        fourth = second * second
        eighth = fourth * fourth
        mean = tl.maximum(tl.sum(eighth * eighth, 1) / size, 1.0 / size)
        root = tl.sqrt_rn(tl.sqrt_rn(tl.sqrt_rn(tl.sqrt_rn(mean))))
        scale = root / (mean * size)
        if SQUARE:
            scale *= root * top
        return root * top, share * second * fourth * eighth * scale[:, None]

    @triton.jit(do_not_specialize=["count"])
    def _to_gradient(  # type: ignore[no-untyped-def]
        x_ptr, count, size, RANGES: tl.constexpr, MANY: tl.constexpr, SIZE: tl.constexpr
    ):
        group = tl.program_id(0).to(tl.int64) * MANY + tl.arange(0, MANY)
        column = tl.arange(0, SIZE)[None, :]
        at = x_ptr + group[:, None] * size + column
        inside = (group < count)[:, None] & (column < size)
        x = tl.load(at, inside, 0.0).to(tl.float32)
        if RANGES:
            above, ahead = _norm(tl.maximum(x, 0.0), size, False)
            below, back = _norm(tl.minimum(x, 0.0), size, False)
            found = (ahead + back) * ((above + below) / 4)[:, None]
        else:
            _, found = _norm(x, size, True)
        tl.store(at, found, inside)


def runs_on(x: Tensor) -> bool:
    """Whether the fused kernel can take groups ``x [..., group]``."""
    fits = x.shape[-1] <= WIDEST and x.is_contiguous() and x.dtype in (torch.float16, torch.float32)
    return fits and triton_runs_on(x)


def to_gradient(x: Tensor, ranges: bool) -> Tensor:
    """``learned_rotation.to_gradient``, in place."""
    size = x.shape[-1]
    block = triton.next_power_of_2(size)
    many, count = max(1, ELEMENTS // block), x.numel() // size
    warps = min(16, max(4, block // 512))
    options = {"MANY": many, "SIZE": block, "num_warps": warps}
    launch(_to_gradient, (triton.cdiv(count, many),), x, count, size, ranges, **options)
    return x
