"""The host side of ``csrc/hopper/gemm.cuh``: pick a tile, get the kernel, pack its parameters,
launch.

Legend: M tokens, N output channels, K input channels, G level-2 groups of a channel.
"""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.build import Build, cubin
from qtool.kernels.hopper.tiles import SHARED_PER_BLOCK, Tile
from qtool.kernels.hopper.wgmma import wgmma_source
from qtool.kernels.launch import launch, load, tensor_map

THREADS = 384  # two consumer warpgroups and the producer's
KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int32: 3}


@dataclass(frozen=True)
class Operand:
    """The weight operand a kernel is compiled for: source file, its macros, bytes of a stage of 128
    rows.

    ``token_bytes`` is what a stage holds of each token beside its 128 codes: scales of groups.
    """

    source: str
    defines: tuple[tuple[str, int], ...]
    stage_bytes: int
    token_bytes: int = 0

    def stage(self, tile: Tile) -> int:
        """Bytes of a stage beside the tokens' codes."""
        return self.stage_bytes * tile.panels + -(-self.token_bytes * tile.tokens // 512) * 512


@dataclass(frozen=True)
class Weight:
    """The tensors behind the operand; absent ones are ``None``."""

    scale1: Tensor  # [N], or [G, N] scales of groups
    qweight: Tensor | None = None  # dual-MMA tiles
    scale2: Tensor | None = None
    offset2: Tensor | None = None
    zero1: Tensor | None = None
    boxed: Tensor | None = (
        None  # codes that are copied by boxes: a matrix of bytes, such as int8 [N, K]
    )
    box: tuple[int, int] = (64, 128)  # rows and bytes of a box: 64 output channels by 128 inputs


def definition(
    operand: Operand, tile: Tile, out_dtype: torch.dtype
) -> tuple[str, str, dict[str, int]]:
    """Source name, generated prologue and macros of one kernel, for
    :func:`qtool.kernels.build.cubin`.
    """
    defines = dict(operand.defines) | {
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "SPLIT": tile.split,
        "STAGES": tile.stages(operand.stage(tile), staging_bytes(tile, out_dtype)),
        "BLOCKS_PER_SM": tile.blocks_per_sm,
        "OUT": KINDS[out_dtype],
        "SHARED_BYTES": SHARED_PER_BLOCK[tile.blocks_per_sm],
    }
    prologue = "typedef unsigned int u32;\ntypedef unsigned long long u64;\ntemplate <int N>\nstruct Wgmma;\n"
    return operand.source, prologue + wgmma_source(tile.tokens), defines


def staging_bytes(tile: Tile, out_dtype: torch.dtype) -> int:
    """Of csrc/hopper/epilogue.cuh: two buffers a warpgroup, padded rows of 64 channels a token."""
    item = out_dtype.itemsize
    tokens = (32 if tile.tokens >= 128 else 16) // (2 if item == 4 else 1)
    return 2 * 2 * tokens * (64 * item + 16)


def builds(name: str, operand: Operand, tiles: Iterable[Tile]) -> Iterator[Build]:
    """The kernel of ``operand`` with each size of ``tiles``, least and most split: wgmma, registers
    for its blocks.
    """
    ordered = sorted(
        tiles, key=lambda tile: (tile.tokens, tile.rows, tile.split / tile.blocks_per_sm)
    )
    for _, same in groupby(ordered, key=lambda tile: (tile.tokens, tile.rows)):
        width = list(same)
        for tile in dict.fromkeys((width[0], width[-1])):
            source, threads = (
                definition(operand, tile, torch.bfloat16),
                THREADS * tile.blocks_per_sm,
            )
            yield Build(
                f"{name} {tile}", "sm_90a", source, threads, (f"IGMMA.64x{tile.tokens}x32.",)
            )


@cache
def _kernel(operand: Operand, tile: Tile, out_dtype: torch.dtype, device: int) -> Any:
    code = cubin(*definition(operand, tile, out_dtype), "sm_90a")
    return load(code, "qtool_gemm", SHARED_PER_BLOCK[tile.blocks_per_sm], device)


def run(
    operand: Operand,
    tile: Tile,
    x: Tensor,
    sx: Tensor,
    weight: Weight,
    out: Tensor,
    *,
    token_sum: Tensor | None = None,
    bias: Tensor | None = None,
    overlap: bool = True,
) -> None:
    """Launch ``out [M, N] = x [M, K] W^T`` with the fused epilogue. All checks were made by the op."""
    (m, k), n = x.shape, out.shape[1]
    device = x.device
    require_hopper(device)
    with torch.cuda.device(device):
        kernel = _kernel(operand, tile, out.dtype, device.index)
        token_tiles = -(-m // tile.tokens)
        tiles = token_tiles * -(-n // tile.rows)
        resident = (
            torch.cuda.get_device_properties(device).multi_processor_count * tile.blocks_per_sm
        )
        clusters = (
            tiles if tile.split > 2 else min(tiles, resident // tile.split)
        )  # of more than two one tile each
        level2 = (weight.qweight, weight.scale2, weight.offset2)
        tensors = (*level2, weight.scale1, weight.zero1, bias, sx, token_sum, out)
        parameters = struct.pack(
            "<128s128s9Q7i28x",
            tensor_map(x, tile.tokens),
            tensor_map(weight.boxed, *weight.box) if weight.boxed is not None else b"",
            *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
            *(m, n, k),
            KINDS[weight.scale1.dtype],
            0 if bias is None else KINDS[bias.dtype],
            *(token_tiles, tiles),
        )
        shared_bytes = SHARED_PER_BLOCK[tile.blocks_per_sm]
        launch(
            kernel,
            tile.split * clusters,
            THREADS,
            shared_bytes,
            parameters,
            device,
            overlap=overlap,
        )


def require_hopper(device: torch.device) -> None:
    """Refuse a GPU without wgmma."""
    major, minor = torch.cuda.get_device_capability(device)
    if major != 9:
        raise QtoolError(f"this kernel needs a Hopper GPU (sm_90), {device} is sm_{major}{minor}")
