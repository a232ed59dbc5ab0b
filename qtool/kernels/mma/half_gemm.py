"""The host side of ``csrc/mma/half_gemm.cuh``: compile for a tile, pack the parameters, launch.

Legend: M tokens, N output channels, K input channels, G groups of a channel.
"""

import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from qtool.kernels.build import ARCHITECTURES, Source, cubin
from qtool.kernels.dtypes import NUMBERS
from qtool.kernels.launch import item_map, launch, load, pointers, require_listed
from qtool.kernels.mma.half_tiles import HalfTile

ADD_THREADS = 256
#: csrc/mma/half_shape.cuh, after the four maps
PARAMETERS = struct.Struct("<7Q5i52x")


@dataclass(frozen=True)
class HalfWeight:
    """A packed weight: codes int32, scales ``[G, N]``, and positions if it is 2:4 sparse."""

    qweight: Tensor
    scale: Tensor
    metadata: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """N and K: both layouts store two words a row for each output channel."""
        rows, words = self.qweight.shape
        return words // 2, rows * (16 if self.metadata is None else 32)

    @property
    def group(self) -> int:
        """Input channels per scale; 0 if there is one scale for an output channel."""
        groups = self.scale.shape[0]
        return 0 if groups == 1 else self.shape[1] // groups


@dataclass(frozen=True)
class Variant:
    """The properties that a kernel is compiled for besides its tile."""

    sparse: bool
    group: int
    x: torch.dtype
    scale: torch.dtype
    out: torch.dtype

    def stage_bytes(self, tile: HalfTile) -> int:
        """Bytes of a team's ring slot: tokens, codes, positions, scales of 64 input channels."""
        codes = 1024 + 512 if self.sparse else 2048
        scales = 64 * self.scale.itemsize * (max(1, 64 // self.group) if self.group else 0)
        return tile.block_tokens * 128 + tile.column_warps * (codes + scales)


def definition(
    variant: Variant, tile: HalfTile, capability: tuple[int, int], *, hopper: bool
) -> Source:
    """Source name, prologue and macros of one kernel, for :func:`qtool.kernels.build.cubin`.

    Args:
        hopper: bulk copies fill the rings, and the blocks that split K add their sums as a cluster
            (sm_90).
    """
    return (
        "mma/w4a16_24_gemm" if variant.sparse else "mma/w4a16_gemm",
        "",
        {
            "GROUP": variant.group,
            "KIND": NUMBERS[variant.x],
            "SCALE": NUMBERS[variant.scale],
            "OUT": NUMBERS[variant.out],
            "TOKENS": tile.tokens,
            "TOKEN_WARPS": tile.token_warps,
            "COLUMN_WARPS": tile.column_warps,
            "TEAMS": tile.teams,
            "SPLIT": tile.split,
            "STAGES": tile.stages(variant.stage_bytes(tile), shared_bytes(tile, capability)),
            "BLOCKS_PER_SM": tile.blocks_per_sm,
            "HOPPER": int(hopper),
            "SHARED_BYTES": shared_bytes(tile, capability),
        },
    )


def maps(tile: HalfTile, x: Tensor, weight: HalfWeight) -> bytes:
    """TMA descriptors of the boxes for 64 input channels: tokens, codes, positions, scales."""
    n, columns = weight.shape[0], tile.columns
    tokens = item_map(x, x.shape[1], tile.block_tokens, 64, swizzle=128)
    metadata, group = bytes(128), bytes(128)
    if weight.metadata is not None:
        metadata = item_map(weight.metadata, n, 2, columns)
    if weight.group:
        group = item_map(weight.scale, n, max(1, 64 // weight.group), columns)
    return (
        tokens
        + item_map(weight.qweight, n, 4 if weight.metadata is None else 2, columns)
        + metadata
        + group
    )


def shared_bytes(tile: HalfTile, capability: tuple[int, int]) -> int:
    """Shared memory that a block may use: its share, less the system's kilobyte a block."""
    return (ARCHITECTURES[capability][1] + 1) // tile.blocks_per_sm * 1024 - 1024


@cache
def _kernels(
    variant: Variant, tile: HalfTile, device: torch.device, hopper: bool
) -> tuple[int, int | None]:
    capability = require_listed(device)
    source = definition(variant, tile, capability, hopper=hopper)
    code = cubin(*source, ARCHITECTURES[capability][0])
    main = load(code, "qtool_gemm", source[2]["SHARED_BYTES"], device.index)
    alone = hopper or tile.split == 1
    return main, None if alone else load(code, "qtool_add_splits", 0, device.index)


def run(
    tile: HalfTile,
    x: Tensor,
    weight: HalfWeight,
    out: Tensor,
    bias: Tensor | None,
    *,
    hopper: bool | None = None,
) -> None:
    """Launch ``out [M, N] = x [M, K] W^T``. All checks were made by the op.

    Args:
        hopper: see :func:`definition`; by default on Hopper.
    """
    device, (m, k), n = x.device, x.shape, out.shape[1]
    capability = require_listed(device)
    overlap = capability >= (9, 0)
    hopper = capability == (9, 0) if hopper is None else hopper
    sparse, dtypes = weight.metadata is not None, (x.dtype, weight.scale.dtype, out.dtype)
    main, add = _kernels(Variant(sparse, weight.group, *dtypes), tile, device, hopper)
    token_tiles = -(-m // tile.block_tokens)
    grid = tile.split * token_tiles * -(-n // tile.columns)
    workspace = None if add is None else x.new_empty((tile.split, m, n), dtype=torch.float32)
    tensors = (x, weight.qweight, weight.metadata, weight.scale, bias, out, workspace)
    kind = 0 if bias is None else NUMBERS[bias.dtype]
    parameters = maps(tile, x, weight) if hopper else bytes(4 * 128)
    parameters += PARAMETERS.pack(*pointers(*tensors), m, n, k, kind, token_tiles)
    shared = shared_bytes(tile, capability)
    launch(main, grid, tile.threads, shared, parameters, device, overlap=overlap)
    if add is not None:
        blocks = -(-m * n // (4 * ADD_THREADS))
        launch(add, blocks, ADD_THREADS, 0, parameters, device, overlap=overlap)
