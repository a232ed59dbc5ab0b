"""A weight stored as codes of 8 or 4 bits with a scale a block, computed when it is read.

    W[n, k] = code[n, k] * scale[n // bn, k // bk] / divisor

The product is computed in float32 and rounded once. Codes are float8_e4m3fn, or E2M1 (0, 0.5, 1,
1.5, 2, 3, 4, 6 and their negatives), two in a byte with the even column in the low half. Scales are
floats, or bytes that stand for powers of two (E8M0: ``2 ** (byte - 127)``). Blocks at the edges may
be smaller (Open Compute Project, Microscaling Formats 1.0, section 5; DeepSeek-V3, section 3.3).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.io.safetensors import Computed, Entry, read

#: ``[bn, bk]``, rows and columns of a block
Block = tuple[int, int]
#: number of weights that are in memory in float32 at a time
PIECE = 1 << 22

_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
#: the two values of each byte, ``[256, 2]``
_PAIRS = torch.stack([_E2M1.repeat(16), _E2M1.repeat_interleave(16)], dim=1)


@dataclass(frozen=True)
class BlockScaled(Computed):
    """A weight with the operands ``(codes [N, K], scales [N / bn, K / bk])``, or stacks of them.

    A third operand, ``[1]``, is a divisor of the scales.

    Attributes:
        shape: ``[N, K]`` of the weight, or of each matrix of a stack.
        block: ``[bn, bk]``.
        dtype: dtype of the weight.
        transposed: the tensor is ``W.T``.
    """

    shape: tuple[int, int]
    block: Block
    dtype: torch.dtype
    transposed: bool

    def read(self, rows: slice, *, transposed: bool = False) -> Tensor:
        if len(stack := self.operands[0].shape) > 2:
            numbers = range(stack[0])[rows]
            return torch.stack([self.matrix(number).read(slice(None)) for number in numbers])
        if transposed != self.transposed:
            return self._weight(slice(None)).T[rows].contiguous()
        return self._weight(rows)

    def _weight(self, rows: slice) -> Tensor:
        """The ``rows`` of ``W [N, K]``, in pieces."""
        (n, k), (codes, scales, *divisor) = self.shape, self.operands
        bn, bk = self.block
        grid = _as_float(read(scales))
        if divisor:
            grid = grid / read(divisor[0]).float()
        picked = range(n)[rows]
        weight = torch.empty(len(picked), k, dtype=self.dtype)
        step = max(1, PIECE // k)
        for start in range(0, len(picked), step):
            piece = picked[start : start + step]
            stored = read(codes, slice(piece.start, piece.stop, piece.step))
            values = _as_float(stored) if stored.dtype == torch.float8_e4m3fn else _pairs(stored)
            scale = grid[torch.tensor(piece) // bn]
            edge = k // bk * bk  # the columns from here on are a narrower block
            if edge:
                values[:, :edge].unflatten(1, (-1, bk)).mul_(scale[:, : k // bk, None])
            values[:, edge:].mul_(scale[:, -1:])
            weight[start : start + step] = values
        return weight


def block_scaled(
    name: str,
    codes: Entry,
    scales: Entry,
    blocks: Sequence[Block],
    dtype: torch.dtype,
    *,
    divisor: Entry | None = None,
    transposed: bool = False,
) -> Entry:
    """The weight ``name`` made from ``codes [..., N, K]`` and ``scales``.

    Args:
        blocks: sizes of blocks that scales may have; one scale for a row or for a matrix is always
            accepted.

    Raises:
        QtoolError: codes are no matrix, scales fit none of these blocks, a divisor is not one
            number for a matrix, or one of them has another dtype.
    """
    if len(codes.shape) < 2 or 0 in codes.shape:
        raise QtoolError(f"{name}: codes of shape {list(codes.shape)} are no matrix")
    *stack, n, k = codes.shape
    if codes.dtype.itemsize == 1 and codes.dtype != torch.float8_e4m3fn:
        k *= 2
    block, grid = _block_and_grid(name, scales.shape, (*stack, n, k), blocks)
    powers = scales.dtype == torch.uint8 and divisor is None
    if not (scales.dtype.is_floating_point or powers):
        raise QtoolError(f"{name}: its scales are {scales.dtype}; floats are expected")
    operands: tuple[Entry, ...] = (codes, replace(scales, shape=grid))
    if divisor is not None:
        if prod(divisor.shape) != prod(stack) or not divisor.dtype.is_floating_point:
            raise QtoolError(
                f"{name}: a global scale {divisor.dtype} {list(divisor.shape)} found; one float a "
                "matrix is expected"
            )
        operands += (replace(divisor, shape=(*stack, 1)),)
    computed = BlockScaled(operands, (n, k), block, dtype, transposed)
    shape = (*stack, k, n) if transposed else (*stack, n, k)
    return Entry(codes.path, dtype, shape, codes.start, computed=computed)


def _block_and_grid(
    name: str, scales: tuple[int, ...], shape: tuple[int, ...], blocks: Sequence[Block]
) -> tuple[Block, tuple[int, ...]]:
    """The block of a weight of ``shape`` that has scales of shape ``scales``, and their full shape.

    Scales may be stored without dimensions of size 1.
    """
    *stack, n, k = shape
    for bn, bk in (*blocks, (1, k), (n, k)):
        grid = (*stack, -(-n // bn), -(-k // bk))
        fewer = len(scales) < len(grid)
        if scales == grid or (fewer and _without_ones(grid) == _without_ones(scales)):
            return (bn, bk), grid
    known = "".join(f" or a block of {bn} x {bk}" for bn, bk in blocks)
    raise QtoolError(
        f"{name}: scales {list(scales)} found; one a matrix, one a row{known} of [{n}, {k}] are "
        "expected"
    )


def block_of(sizes: Any, setting: str) -> Block:
    """The block that ``setting`` names.

    Raises:
        QtoolError: ``sizes`` is no pair of positive integers.
    """
    if isinstance(sizes, list) and len(sizes) == 2:
        rows, columns = sizes
        if type(rows) is int and type(columns) is int and rows > 0 < columns:
            return rows, columns
    raise QtoolError(f"{setting} is {sizes!r}; [rows, columns] of a block is expected")


def _without_ones(shape: Iterable[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _as_float(stored: Tensor) -> Tensor:
    """Stored numbers in float32; bytes are read as exponents (E8M0)."""
    return (stored.view(torch.float8_e8m0fnu) if stored.dtype == torch.uint8 else stored).float()


def _pairs(codes: Tensor) -> Tensor:
    """The values of ``codes [N, K / 2]``, two E2M1 in a byte, in float32 ``[N, K]``."""
    values = _PAIRS.index_select(0, codes.view(torch.uint8).flatten().int())
    return values.view(len(codes), 2 * prod(codes.shape[1:]))
