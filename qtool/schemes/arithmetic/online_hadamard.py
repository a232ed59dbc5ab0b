"""The Hadamard rotation of a linear's inputs while the model runs.

``x' = x (I kron H) / 8`` with H the Hadamard matrix of 64 channels (Sylvester's order). The
weight's columns are rotated in the same way, once: ``x' W'^T = x W^T``. This spreads a large value
over 64 channels where no rotation can be folded into the preceding operations, as at the inputs of
down projections (QuaRot, arXiv 2404.00456, section 4; SpinQuant's R4, arXiv 2405.16406). H is
symmetric, and H / 8 its own inverse.
"""

from typing import Any

import torch
from torch import Tensor

#: channels that are rotated together; kernels cut K into multiples of it
SPAN = 64
SCALE = SPAN**-0.5  # a power of two: exact


def rotate(x: Tensor) -> Tensor:
    """``x' [..., K]`` float32 of ``x [..., K]``, by sums in the order in which kernels add them.

    K is a multiple of 64.
    """
    y = x.float()
    width = 1
    while width < SPAN:
        low, high = y.unflatten(-1, (-1, 2, width)).unbind(-2)
        y = torch.stack((low + high, low - high), -2).flatten(-3)
        width *= 2
    return y * SCALE


def rotate_fast(x: Tensor) -> Tensor:
    """:func:`rotate` by a matrix product, in x's dtype."""
    matrix = rotate(torch.eye(SPAN, device=x.device)).to(x.dtype)
    return (x.unflatten(-1, (-1, SPAN)) @ matrix).flatten(-2)


def rotate_input(_: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A forward pre-hook of a linear whose columns are rotated."""
    return (rotate_fast(inputs[0]),)
