"""The protocol of a packed layout: a permutation of a weight's codes and parameters.

``pack`` and ``unpack`` are each other's inverse on any device, on ``meta`` too.
:mod:`qtool.layouts.digits` explains how a layout is stated, once, by the digits of the indices.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from qtool.errors import QtoolError


class Layout(ABC):
    """The places of the codes and parameters of one weight ``[N, K]``."""

    #: its name in recipes, in checkpoints and on the command line
    name: str
    #: bits of a code
    bits: int
    #: a weight's N must be a multiple of the first, its K of the second
    tile: tuple[int, int]
    #: whether weights stacked along N are stored one after another
    by_rows: bool = False
    #: ``(2, 4)``: it stores 2 of 4 consecutive inputs of a scheme with this sparsity; ``None``: all
    sparsity: ClassVar[tuple[int, int] | None] = None
    #: names of the stored tensors that ``pack`` makes
    tensors: ClassVar[tuple[str, ...]] = ("qweight",)

    def require(self, n: int, k: int) -> None:
        """Raise QtoolError unless a weight ``[n, k]`` fits the layout's tile."""
        require_tile(self.name, n, k, self.tile)

    @abstractmethod
    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        """Stored tensors of ``codes [N, K]``, uint8 or int8, of :attr:`bits` bits each.

        int8 codes are stored in two's complement.
        """

    @abstractmethod
    def unpack(self, packed: dict[str, Tensor], n: int, k: int, *, signed: bool) -> Tensor:
        """The codes ``[n, k]`` again: int8 if ``signed``, else uint8. Inverse of :meth:`pack`."""

    def pack_group(self, param: Tensor) -> Tensor:
        """A per-group parameter ``[N, G]`` in the kernel's order; by default unchanged."""
        return param

    def unpack_group(self, stored: Tensor, n: int) -> Tensor:
        """Inverse of :meth:`pack_group`: ``[n, G]``."""
        return stored

    def pack_channel(self, param: Tensor) -> Tensor:
        """A per-channel parameter ``[N]`` in the kernel's order; by default unchanged."""
        return param

    def unpack_channel(self, stored: Tensor) -> Tensor:
        """Inverse of :meth:`pack_channel`: ``[N]``."""
        return stored


def require_tile(name: str, n: int, k: int, tile: tuple[int, int]) -> None:
    """Raise QtoolError unless ``[n, k]`` is a whole number of tiles, and not empty."""
    rows, columns = tile
    if n % rows or k % columns or not n or not k:
        raise QtoolError(
            f"layout {name}: a weight of {n} x {k} does not divide into tiles of {rows} x {columns}"
        )


def require_codes(name: str, codes: Tensor) -> None:
    """Raise QtoolError unless ``codes`` is a matrix of one code a byte."""
    if codes.dim() != 2 or codes.dtype not in (torch.uint8, torch.int8):
        raise QtoolError(
            f"layout {name}: codes must be a uint8 or int8 matrix, got {codes.dtype} of shape "
            f"{tuple(codes.shape)}"
        )


def require_bytes(name: str, stored: Tensor, size: int) -> None:
    """Raise QtoolError unless ``stored`` holds ``size`` bytes."""
    if stored.nbytes != size:
        raise QtoolError(
            f"layout {name}: a stored tensor of {stored.nbytes} bytes was found where {size} belong"
        )
