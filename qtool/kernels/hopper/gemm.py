"""The host side of ``csrc/hopper/gemm.cuh``: choose a tile, load the kernel, launch.

Legend: M tokens, N output channels, K input channels, G level-2 groups of a channel.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import Build, Source, cubin
from qtool.kernels.dtypes import NUMBERS
from qtool.kernels.hopper.tiles import SHARED_PER_BLOCK, Tile
from qtool.kernels.hopper.wgmma import wgmma_source
from qtool.kernels.launch import (
    byte_map,
    compute_capability,
    launch,
    load,
    multiprocessors,
    pointers,
)

THREADS = 384  # two consumer warpgroups and the producer's
#: csrc/hopper/params.cuh
PARAMETERS = struct.Struct("<128s128s9Q7i4xQ3i4x128s")


@dataclass(frozen=True)
class Operand:
    """The weight operand of a kernel: source file, macros, bytes of a stage of 128 rows.

    ``token_bytes`` are the bytes that a stage holds of each token beyond 128: scales of groups, the
    second half of 16-bit channels. ``token_item`` is the number of bytes of a token's channel.
    ``box`` gives the rows and bytes of a copy of boxed codes, by default 64 output channels by 128
    inputs. ``table_bytes`` is the size of a block's table of experts.
    """

    source: str
    defines: tuple[tuple[str, int], ...]
    stage_bytes: int
    token_bytes: int = 0
    token_item: int = 1
    box: tuple[int, int] = (64, 128)
    table_bytes: int = 0

    def stage(self, tile: Tile) -> int:
        """Bytes of a stage without the first 128 of each token."""
        return self.stage_bytes * tile.panels + -(-self.token_bytes * tile.tokens // 512) * 512


@dataclass(frozen=True)
class Weight:
    """The tensors behind the operand; absent ones are ``None``."""

    scale1: Tensor  # [N], or [G, N] scales of groups, in the layout's order
    qweight: Tensor | None = None  # dual-MMA tiles
    scale2: Tensor | None = None
    offset2: Tensor | None = None
    zero1: Tensor | None = None
    boxed: Tensor | None = None  # codes copied by boxes: a matrix of bytes, such as int8 [N, K]
    positions: Tensor | None = None  # of kept 2:4 weights, half as many bytes as codes
    part: int | None = None  # output channels of a matrix of marlin tiles, if there are several


def definition(operand: Operand, tile: Tile, out_dtype: torch.dtype) -> Source:
    """Source name, prologue and macros of one kernel, for :func:`qtool.kernels.build.cubin`."""
    beside = staging_bytes(tile, out_dtype) + operand.table_bytes
    defines = dict(operand.defines) | {
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "SPLIT": tile.split,
        "STAGES": tile.stages(operand.stage(tile), beside),
        "BLOCKS_PER_SM": tile.blocks_per_sm,
        "OUT": NUMBERS[out_dtype],
        "SHARED_BYTES": SHARED_PER_BLOCK[tile.blocks_per_sm],
    }
    types = "typedef unsigned int u32;\ntypedef unsigned long long u64;\n"
    prologue = types + "template <int N>\nstruct Wgmma;\n"
    return operand.source, prologue + wgmma_source(tile.tokens), defines


def staging_bytes(tile: Tile, out_dtype: torch.dtype) -> int:
    """Bytes for csrc/hopper/epilogue.cuh: per warpgroup two buffers of padded 64-channel rows."""
    item = out_dtype.itemsize
    tokens = (32 if tile.tokens >= 128 else 16) // (2 if item == 4 else 1)
    return 2 * 2 * tokens * (64 * item + 16)


def builds(
    name: str, operand: Operand, tiles: Iterable[Tile], instruction: str = "IGMMA.64x{}x32."
) -> Iterator[Build]:
    """The kernel of ``operand`` with the sizes of ``tiles``, split least and most.

    Its machine code must contain the wgmma ``instruction`` for the tokens of a tile, and leave
    enough registers for the blocks per SM.
    """
    ordered = sorted(
        tiles, key=lambda tile: (tile.tokens, tile.rows, tile.split / tile.blocks_per_sm)
    )
    for _, same in groupby(ordered, key=lambda tile: (tile.tokens, tile.rows)):
        width = list(same)
        for tile in dict.fromkeys((width[0], width[-1])):
            source = definition(operand, tile, torch.bfloat16)
            threads, instructions = THREADS * tile.blocks_per_sm, (instruction.format(tile.tokens),)
            yield Build(f"{name} {tile}", "sm_90a", source, threads, instructions)


@cache
def _kernel(operand: Operand, tile: Tile, out_dtype: torch.dtype, device: int) -> int:
    code = cubin(*definition(operand, tile, out_dtype), "sm_90a")
    return load(code, "qtool_gemm", SHARED_PER_BLOCK[tile.blocks_per_sm], device)


class Kernel(NamedTuple):
    """The kernel of one tile with a weight: its handle, and what a launch with it needs.

    ``token_bytes`` is the size of a token's channels; ``resident`` is how many of its blocks the
    GPU holds at once; the maps are of the weight's boxes.
    """

    handle: int
    token_bytes: int
    resident: int
    weight_map: bytes
    positions_map: bytes


class Plan:
    """Launches of ``Y = X W^T`` for one weight ``[N, K]`` and any tokens, epilogue fused.

    What depends on the weight is computed once, and what depends on the tile when it is first used.
    The op checks the arguments. The weight's tensors are not kept: they have to live as long.

    Args:
        choose: function of a number of tokens that gives the operand and the tile.
        shape: N and K.
        experts: the number of weights ``[N, K]`` whose rows follow one another in ``weight``, each
            for its own tokens; 0: ``weight`` is one for all tokens.
    """

    def __init__(
        self,
        choose: Callable[[int], tuple[Operand, Tile]],
        weight: Weight,
        bias: Tensor | None,
        shape: tuple[int, int],
        out_dtype: torch.dtype,
        *,
        overlap: bool = True,
        experts: int = 0,
    ) -> None:
        (self.n, self.k), self.device = shape, weight.scale1.device
        require_hopper(self.device)
        self.choose, self.out_dtype, self.overlap = choose, out_dtype, overlap
        self.boxed, self.positions = _matrix(weight.boxed), _matrix(weight.positions)
        level2 = (weight.qweight, weight.scale2, weight.offset2)
        self.weight = pointers(*level2, weight.scale1, weight.zero1, bias)
        kinds = NUMBERS[weight.scale1.dtype], 0 if bias is None else NUMBERS[bias.dtype]
        self.numbers = self.n * (experts or 1), self.k, *kinds
        self.experts, self.part = experts, weight.part or self.n
        self.kernels: dict[Tile, Kernel] = {}

    def launch(self, m: int, x: int, sx: int, token_sum: int, out: int, offsets: int = 0) -> None:
        """Start the kernel for M tokens; they, their scales, sums and outputs are at addresses.

        ``offsets``: the address of the first token of each expert.
        """
        if m == 0:
            return
        operand, tile = self.choose(m)
        kernel = self.kernels.get(tile) or self._load(operand, tile)
        token_tiles = most_token_tiles(m, self.experts or 1, tile.tokens)
        tiles = token_tiles * -(-self.n // tile.rows)
        # clusters of more than two blocks have one tile each
        clusters = tiles if tile.split > 2 else min(tiles, kernel.resident // tile.split)
        parameters = PARAMETERS.pack(
            byte_map(x, m, kernel.token_bytes, tile.tokens),
            kernel.weight_map,
            *(*self.weight, sx, token_sum, out),
            *(m, *self.numbers, token_tiles, tiles, offsets, self.experts, self.n, self.part),
            kernel.positions_map,
        )
        grid, shared = tile.split * clusters, SHARED_PER_BLOCK[tile.blocks_per_sm]
        launch(kernel.handle, grid, THREADS, shared, parameters, self.device, overlap=self.overlap)

    def _load(self, operand: Operand, tile: Tile) -> Kernel:
        rows, box_bytes = operand.box
        self.kernels[tile] = kernel = Kernel(
            _kernel(operand, tile, self.out_dtype, self.device.index),
            self.k * operand.token_item,
            multiprocessors(self.device) * tile.blocks_per_sm,
            b"" if self.boxed is None else byte_map(*self.boxed, rows, box_bytes),
            b"" if self.positions is None else byte_map(*self.positions, rows, box_bytes // 2),
        )
        return kernel


def run(
    operand: Operand,
    tile: Tile,
    x: Tensor,
    sx: Tensor | None,
    weight: Weight,
    out: Tensor,
    *,
    token_sum: Tensor | None = None,
    bias: Tensor | None = None,
    offsets: Tensor | None = None,
    overlap: bool = True,
) -> None:
    """Launch ``out [M, N] = x [M, K] W^T`` once.

    ``offsets``: int32 ``[E + 1]``, the first token of each of E experts, and the end of the last.
    """
    shape, experts = (out.shape[1], x.shape[1]), 0 if offsets is None else len(offsets) - 1
    given = (lambda _: (operand, tile)), weight, bias, shape, out.dtype
    plan = Plan(*given, overlap=overlap, experts=experts)
    plan.launch(len(out), *pointers(x, sx, token_sum, out, offsets))


def _matrix(boxes: Tensor | None) -> tuple[int, int, int] | None:
    """Address, rows and columns of a matrix of bytes."""
    return None if boxes is None else (boxes.data_ptr(), boxes.shape[0], boxes.shape[1])


def most_token_tiles(m: int, experts: int, tokens: int) -> int:
    """The most tiles of ``tokens`` that M tokens need, however they are spread over ``experts``."""
    begun = min(m, experts)
    return begun + (m - begun) // tokens


def require_hopper(device: torch.device) -> None:
    """Refuse a GPU without wgmma."""
    major, minor = compute_capability(device)
    if major != 9:
        raise QtoolError(f"this kernel needs a Hopper GPU (sm_90), {device} is sm_{major}{minor}")
