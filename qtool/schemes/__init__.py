"""What the numbers mean: one file a scheme. ``get(name, ...)`` makes one."""

import torch

from qtool.errors import QtoolError, suggest
from qtool.schemes.base import Grid, Params, Scheme
from qtool.schemes.lqq import LiquidQuant

SCHEMES: dict[str, type[Scheme]] = {scheme.name: scheme for scheme in (LiquidQuant,)}


def get(name: str, group_size: int | None, scale_dtype: torch.dtype = torch.float32) -> Scheme:
    """The scheme ``name`` at ``group_size`` input channels a group (``None``: the whole channel).

    Raises:
        QtoolError: for an unknown name or a group size the scheme does not have.
    """
    if name not in SCHEMES:
        raise QtoolError(f"unknown scheme {name!r}: {suggest(name, SCHEMES)}")
    return SCHEMES[name](group_size, scale_dtype)


__all__ = ["SCHEMES", "Grid", "Params", "Scheme", "get"]
