"""The host side of ``csrc/mma/mma_gemm.cuh``, the integer GEMM of Ampere and Ada.

Legend: M tokens, N output channels, K input channels, G groups of a channel.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from qtool.kernels.build import ARCHITECTURES, Build, Source, cubin
from qtool.kernels.dtypes import NUMBERS
from qtool.kernels.launch import (
    compute_capability,
    launch,
    load,
    multiprocessors,
    pointers,
    require_listed,
    resident_blocks,
)

#: csrc/mma/mma_params.cuh
PARAMETERS = struct.Struct("<13Q7i4x")
#: bytes of shared memory of a block with few tokens: memory latency bounds it, and several blocks
#: per SM hide that
NARROW = 49152
MOST_STAGES = 6
#: a block's least share of the work, in steps of 128 input channels; with less, passing on its sums
#: costs more than the split saves
LEAST_STEPS = 8
#: from so many tiles per multiprocessor on tall tiles are faster (on an H200: between 0.18 and
#: 0.24)
FULL = 0.2


@dataclass(frozen=True)
class MmaTile:
    """Warps along output channels (32 each), warps along tokens, and tokens of a warp."""

    row_warps: int
    token_warps: int
    warp_tokens: int

    @property
    def rows(self) -> int:
        return 32 * self.row_warps

    @property
    def tokens(self) -> int:
        return self.token_warps * self.warp_tokens

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.token_warps


#: tiles by tokens; tiles with more row warps dequantize a weight once, if there are enough of them
#: to fill the chip
NARROW_TILES = (MmaTile(4, 1, 16), MmaTile(4, 1, 32), MmaTile(4, 2, 32))
TILES = (*NARROW_TILES, MmaTile(8, 1, 64), MmaTile(4, 2, 64), MmaTile(8, 1, 128))


@dataclass(frozen=True)
class MmaOperand:
    """A kernel's weight operand: source, macros, bytes of a stage, a row and a token, tiles."""

    source: str
    defines: tuple[tuple[str, int], ...]
    row_bytes: int
    token_bytes: int
    tiles: tuple[MmaTile, ...] = TILES

    def stage_bytes(self, tile: MmaTile) -> int:
        """Bytes of 128 input channels of a tile."""
        return self.row_bytes * tile.rows + self.token_bytes * tile.tokens


@dataclass(frozen=True)
class MmaWeight:
    """The tensors behind the operand; absent ones are ``None``."""

    qweight: Tensor
    scale1: Tensor
    scale2: Tensor | None = None
    offset2: Tensor | None = None
    zero1: Tensor | None = None
    eight_bit: Tensor | None = None


def choose(tiles: tuple[MmaTile, ...], m: int, n: int, multiprocessors: int) -> MmaTile:
    """The tile for ``Y [m, n]``: the narrowest that holds ``m``, then the tallest.

    The tallest means the most rows that still fill the GPU.
    """
    tokens = min(
        (tile.tokens for tile in tiles if tile.tokens >= m),
        default=max(tile.tokens for tile in tiles),
    )
    fitting = sorted((tile for tile in tiles if tile.tokens == tokens), key=lambda tile: -tile.rows)
    full = (
        tile for tile in fitting if -(-m // tokens) * -(-n // tile.rows) >= FULL * multiprocessors
    )
    return next(full, fitting[-1])


def definition(
    operand: MmaOperand, tile: MmaTile, out_dtype: torch.dtype, capability: tuple[int, int]
) -> Source:
    """Source name, prologue and macros of one kernel, for :func:`qtool.kernels.build.cubin`."""
    shared = NARROW if tile.tokens <= 32 else 1024 * ARCHITECTURES[capability][1]
    stages = min(MOST_STAGES, (shared - 64) // operand.stage_bytes(tile))
    defines = dict(operand.defines) | {
        "ROW_WARPS": tile.row_warps,
        "TOKEN_WARPS": tile.token_warps,
        "WARP_TOKENS": tile.warp_tokens,
        "STAGES": stages,
        "OUT": NUMBERS[out_dtype],
        "SHARED_BYTES": shared,
    }
    return operand.source, "", defines


def builds(
    name: str, operand: MmaOperand, instruction: str, *, s4: bool, all_tiles: bool
) -> Iterator[Build]:
    """The kernel of ``operand`` with the widest tile, or with all of them if ``all_tiles``.

    Code for Hopper calls a subroutine that emulates s4 tensor cores. Code for Blackwell would too,
    so Blackwell gets no s4 kernel.
    """
    for capability in ((8, 0), (8, 9), (9, 0), *(() if s4 else ((10, 0), (12, 0)))):
        arch, emulated = ARCHITECTURES[capability][0], s4 and capability == (9, 0)
        for tile in operand.tiles if all_tiles and arch == "sm_89" else operand.tiles[-1:]:
            source = definition(operand, tile, torch.bfloat16, capability)
            instructions = () if emulated else (instruction,)
            yield Build(
                f"{name} {tile.rows} x {tile.tokens}",
                arch,
                source,
                tile.threads,
                instructions,
                calls=emulated,
            )


@cache
def _kernel(
    operand: MmaOperand, tile: MmaTile, out_dtype: torch.dtype, device: torch.device
) -> tuple[int, int, int]:
    """The loaded kernel, its bytes of shared memory, and the blocks that the device holds."""
    capability = require_listed(device)
    source = definition(operand, tile, out_dtype, capability)
    shared = source[2]["SHARED_BYTES"]
    code = cubin(*source, ARCHITECTURES[capability][0])
    kernel = load(code, "qtool_mma_gemm", shared, device.index)
    resident = resident_blocks(kernel, tile.threads, shared, device)
    return kernel, shared, multiprocessors(device) * resident


def run(
    operand: MmaOperand,
    x: Tensor,
    sx: Tensor,
    weight: MmaWeight,
    out: Tensor,
    k: int,
    *,
    token_sum: Tensor | None = None,
    bias: Tensor | None = None,
    split_k: bool = True,
) -> None:
    """Launch ``out [M, N] = x W^T`` over ``k`` input channels, epilogue fused.

    The op has checked all arguments.

    ``split_k``: several blocks may share the sum over K of a tile.
    """
    (m, n), device = out.shape, x.device
    tile = choose(operand.tiles, m, n, multiprocessors(device))
    kernel, shared, resident = _kernel(operand, tile, out.dtype, device)
    token_tiles = -(-m // tile.tokens)
    tiles, steps = token_tiles * -(-n // tile.rows), -(-k // 128)
    grid = max(1, min(resident, tiles * steps // LEAST_STEPS)) if split_k else tiles
    sums = grid * tile.rows * tile.tokens if split_k else 0
    partial = torch.empty(sums, dtype=torch.int32, device=device)
    ready = torch.zeros(grid, dtype=torch.int32, device=device)
    level2 = (weight.scale2, weight.offset2, weight.scale1, weight.zero1)
    tokens = (bias, sx, token_sum, weight.eight_bit, out)
    kinds = NUMBERS[weight.scale1.dtype], 0 if bias is None else NUMBERS[bias.dtype]
    parameters = PARAMETERS.pack(
        *pointers(x, weight.qweight, *level2, *tokens, partial, ready),
        *(m, n, k, *kinds, token_tiles, tiles),
    )
    overlap = compute_capability(device)[0] >= 9
    launch(kernel, grid, tile.threads, shared, parameters, device, overlap=overlap)
