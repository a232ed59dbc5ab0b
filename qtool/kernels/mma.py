"""The host side of ``csrc/mma_gemm.cuh``, the GEMM of Ampere and Ada: pick a tile, get the kernel, launch.

Legend: M tokens, N output channels, K input channels, G groups of a channel.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import Build, cubin
from qtool.kernels.gemm import KINDS
from qtool.kernels.launch import launch, load, resident_blocks

#: shared memory of a block that every GPU from sm_80 on has, and half of it: two blocks on an SM of sm_86 and sm_89
WIDE, NARROW = 100352, 49152
MOST_STAGES = 6
#: a block's least share of the work, in steps of 128 input channels: below, lending sums costs more than it wins
LEAST_STEPS = 4


@dataclass(frozen=True)
class MmaTile:
    """Warps over output channels (32 each) and over tokens, tokens of a warp."""

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


#: by tokens of a tile
TILES = {16: MmaTile(4, 1, 16), 32: MmaTile(4, 1, 32), 64: MmaTile(4, 2, 32), 128: MmaTile(4, 2, 64)}


@dataclass(frozen=True)
class MmaOperand:
    """What a kernel is compiled for: source, its macros, and bytes of a stage: of a row, of a token."""

    source: str
    defines: tuple[tuple[str, int], ...]
    row_bytes: int
    token_bytes: int
    #: fewer steps than a ring is deep are never split
    tiles: tuple[int, ...] = tuple(TILES)

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


def choose(m: int, sizes: tuple[int, ...]) -> MmaTile:
    """The narrowest tile of ``sizes`` that holds ``m`` tokens, else the widest."""
    return TILES[next((size for size in sizes if m <= size), sizes[-1])]


def definition(operand: MmaOperand, tile: MmaTile, out_dtype: torch.dtype) -> tuple[str, str, dict[str, int]]:
    """Source name, prologue and macros of one kernel, for :func:`qtool.kernels.build.cubin`."""
    shared = NARROW if tile.tokens <= 32 else WIDE
    stages = min(MOST_STAGES, (shared - 64) // operand.stage_bytes(tile))
    defines = dict(operand.defines) | {
        "ROW_WARPS": tile.row_warps,
        "TOKEN_WARPS": tile.token_warps,
        "WARP_TOKENS": tile.warp_tokens,
        "STAGES": stages,
        "OUT": KINDS[out_dtype],
        "SHARED_BYTES": shared,
    }
    return operand.source, "", defines


def builds(name: str, operand: MmaOperand, instruction: str, *, s4: bool) -> Iterator[Build]:
    """The kernel of ``operand`` with each tile; Hopper has no s4 tensor cores and calls their emulation."""
    for arch in ("sm_80", "sm_89", "sm_90a"):
        for size in operand.tiles if arch == "sm_89" else operand.tiles[-1:]:
            source, emulated = definition(operand, TILES[size], torch.bfloat16), s4 and arch == "sm_90a"
            instructions = () if emulated else (instruction,)
            yield Build(f"{name} {size} tokens", arch, source, TILES[size].threads, instructions, calls=emulated)


@cache
def _kernel(operand: MmaOperand, tile: MmaTile, out_dtype: torch.dtype, device: int) -> tuple[Any, int, int]:
    """The loaded kernel, its bytes of shared memory, and how many blocks the device holds at once."""
    properties = torch.cuda.get_device_properties(device)
    source = definition(operand, tile, out_dtype)
    shared = source[2]["SHARED_BYTES"]
    kernel = load(cubin(*source, f"sm_{properties.major}{properties.minor}"), "qtool_mma_gemm", shared, device)
    return kernel, shared, properties.multi_processor_count * resident_blocks(kernel, tile.threads, shared)


def run(
    operand: MmaOperand,
    tile: MmaTile,
    x: Tensor,
    sx: Tensor,
    weight: MmaWeight,
    out: Tensor,
    k: int,
    *,
    token_sum: Tensor | None = None,
    bias: Tensor | None = None,
) -> None:
    """Launch ``out [M, N] = x W^T`` over ``k`` input channels, epilogue fused. All checks were made by the op."""
    (m, n), device = out.shape, x.device
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise QtoolError(f"this kernel needs a GPU from sm_80 on, {device} is sm_{major}{minor}")
    with torch.cuda.device(device):
        kernel, shared, resident = _kernel(operand, tile, out.dtype, device.index)
        token_tiles = -(-m // tile.tokens)
        tiles, steps = token_tiles * -(-n // tile.rows), -(-k // 128)
        grid = max(1, min(resident, tiles * steps // LEAST_STEPS))
        partial = torch.empty(grid * tile.rows * tile.tokens, dtype=torch.int32, device=device)
        ready = torch.zeros(grid, dtype=torch.int32, device=device)
        level2 = (weight.scale2, weight.offset2, weight.scale1, weight.zero1)
        tensors = (x, weight.qweight, *level2, bias, sx, token_sum, weight.eight_bit, out, partial, ready)
        parameters = struct.pack(
            "<13Q7i4x",
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            *(m, n, k),
            KINDS[weight.scale1.dtype],
            0 if bias is None else KINDS[bias.dtype],
            *(token_tiles, tiles),
        )
        launch(kernel, grid, tile.threads, shared, parameters, device, overlap=major >= 9)
