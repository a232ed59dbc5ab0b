"""The order of token codes under packed s4 weights.

A sum over K does not change by a permutation that weight and tokens share. If 16 bytes hold 32
inputs of an output channel, wgmma takes the 16 low nibbles as its first 16 inputs and the 16 high
ones as its last (csrc/hopper/weights_s4.cuh), so the tokens' codes are written in that order:
position ``16 nibble + byte`` holds the input whose weight lies in that nibble of that byte.
"""

from functools import cache

import torch
from torch import Tensor

from qtool import layouts
from qtool.layouts import DigitLayout

#: number of the order in csrc; ``none`` keeps the inputs in their order
ARRANGEMENTS = {"none": 0, "apex4": 1, "w4ax-interleaved": 2}
#: inputs that an order permutes among themselves
SPAN = 32


@cache
def arrangement(layout: str) -> tuple[int, ...]:
    """The input, of each 32, at each position, for weights in ``layout`` of ``ARRANGEMENTS``.

    >>> arrangement("apex4")[:4], arrangement("apex4")[16:20]
    ((0, 2, 4, 6), (1, 3, 5, 7))
    """
    if layout == "none":
        return tuple(range(SPAN))
    where = layouts.get(layout)
    assert isinstance(where, DigitLayout)
    byte, nibble = where.address(torch.tensor(0), torch.arange(SPAN), (where.tile[0], SPAN))
    return tuple(torch.argsort(16 * nibble + byte % 16).tolist())


def arrange(codes: Tensor, layout: str) -> Tensor:
    """``codes [M, K]`` with each 32 inputs in the order of :func:`arrangement`."""
    return codes.unflatten(1, (-1, SPAN))[..., list(arrangement(layout))].flatten(1)


def disarrange(codes: Tensor, layout: str) -> Tensor:
    """Inverse of :func:`arrange`."""
    inverse = torch.argsort(torch.tensor(arrangement(layout))).tolist()
    return codes.unflatten(1, (-1, SPAN))[..., inverse].flatten(1)
