"""Quantization schemes: one file each. ``get(name, ...)`` makes one."""

import torch

from qtool import plugins
from qtool.schemes.base import Grid, GroupSize, Params, Scheme
from qtool.schemes.fmpq import Fmpq
from qtool.schemes.lqq import LiquidQuant
from qtool.schemes.qoq import QoQ
from qtool.schemes.qoq_group import ProgressiveQoQ
from qtool.schemes.w4a4 import Apex4
from qtool.schemes.w4a16 import Marlin
from qtool.schemes.w4a16_24 import SparseMarlin
from qtool.schemes.w8a8 import SmoothQuant

SCHEMES: dict[str, type[Scheme]] = {
    scheme.name: scheme
    for scheme in (SmoothQuant, Marlin, SparseMarlin, QoQ, ProgressiveQoQ, LiquidQuant, Fmpq, Apex4)
}


def get(
    name: str, group_size: GroupSize = "default", scale_dtype: torch.dtype = torch.float32
) -> Scheme:
    """The scheme ``name`` at ``group_size`` input channels a group (``None``: the whole channel).

    Raises:
        QtoolError: for an unknown name or a group size the scheme does not have.
    """
    return plugins.find(SCHEMES, name, "scheme")(group_size, scale_dtype)


__all__ = ["SCHEMES", "Grid", "Params", "Scheme", "get"]
