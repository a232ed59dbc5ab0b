"""``qtool::kv_append``: new keys or values, quantized straight into a preallocated packed cache.

Stores what :mod:`qtool.schemes.kv` makes of them, byte for byte: kv4's codes, scales and zero
points, or kv8's codes.

Legend: B batch, H kv heads, C capacity and t new tokens, D head dimension.
"""

import struct
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.attention.packed_cache import DTYPES, PackedCache, require_lengths
from qtool.kernels.build import Build, cubin
from qtool.kernels.checks import require_tensors
from qtool.kernels.launch import launch, load
from qtool.schemes.kv import KV4

WARPS = 4


@torch.library.custom_op("qtool::kv_append", mutates_args=("codes", "scale", "zero"))
def kv_append(
    x: Tensor,
    codes: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    channel: Tensor | None,
    tokens: int,
    lengths: Tensor | None,
) -> None:
    """Write ``x`` as the last t of the cache's tokens, in place.

    Args:
        x: ``[B, H, t, D]``, float32, float16 or bfloat16, channels adjacent.
        codes: kv4 uint8 ``[B, H, C, D/2]``, kv8 int8 ``[B, H, C, D]``.
        scale, zero: kv4: float16 ``[B, H, C, 1]``.
        channel: float32 ``[H, D]``; kv8's scales; kv4: what a squared error of each channel counts,
            None: all alike.
        tokens: of every sequence afterwards, or the most of any if there are ``lengths``.
        lengths: int32 ``[B]``, tokens of each sequence afterwards; on a GPU, those that lie outside
            0..C are left out.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or number of tokens; one sentence.
    """
    cached = _require(x, codes, scale, zero, channel, tokens, lengths)
    ends = [tokens] * x.shape[0] if lengths is None else lengths.tolist()
    quantizer = KV4(importance=channel) if cached.bits == 4 else cached.quantizer
    for name, new in quantizer.quantize(x).items():
        stored = {"codes": codes, "scale": scale, "zero": zero}[name]
        assert stored is not None
        for row, end in enumerate(ends):
            first, kept = max(end - x.shape[2], 0), max(min(end, cached.capacity), 0)
            if kept > first:
                stored[row, :, first:kept] = new[
                    row, :, first - end + x.shape[2] : kept - end + x.shape[2]
                ]


@kv_append.register_kernel("cuda")
def _(
    x: Tensor,
    codes: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    channel: Tensor | None,
    tokens: int,
    lengths: Tensor | None,
) -> None:
    cached = _require(x, codes, scale, zero, channel, tokens, lengths)
    batch, heads, added, dim = x.shape
    warps, device = batch * heads * added, x.device
    if warps == 0:
        return
    if any(stride % 8 for stride in x.stride()[:3]) or x.data_ptr() % 16:
        x = x.contiguous().clone()
    with torch.cuda.device(device):
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise QtoolError(f"kv_append: needs sm_80 or newer, {device} is sm_{major}{minor}")
        tensors = (x, codes, channel, scale, zero, lengths)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        numbers = (*x.stride()[:3], warps, heads, added, tokens, cached.capacity)
        parameters = struct.pack("<6Q3q5i4x", *pointers, *numbers)
        kernel = _kernel(cached.bits, dim, x.dtype, f"sm_{major}{minor}", device.index)
        launch(kernel, -(-warps // WARPS), 32 * WARPS, 0, parameters, device, overlap=major >= 9)


@kv_append.register_fake
def _(
    x: Tensor,
    codes: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    channel: Tensor | None,
    tokens: int,
    lengths: Tensor | None,
) -> None:
    _require(x, codes, scale, zero, channel, tokens, lengths)


@cache
def _kernel(bits: int, dim: int, dtype: torch.dtype, arch: str, device: int) -> Any:
    return load(cubin(*definition(bits, dim, dtype), arch), "kv_append", 0, device)


def definition(bits: int, dim: int, dtype: torch.dtype) -> tuple[str, str, dict[str, int]]:
    """Source name, prologue and macros of one kernel."""
    return "attention/kv_append", "", {"BITS": bits, "DIM": dim, "DTYPE": DTYPES[dtype]}


def builds() -> Iterator[Build]:
    """Both caches and every dtype, on each architecture."""
    for arch, bits, dtype in product(("sm_80", "sm_89", "sm_90a"), (4, 8), DTYPES):
        name = f"kv_append kv{bits} {str(dtype).removeprefix('torch.')}"
        yield Build(name, arch, definition(bits, 128, dtype), 1024, calls=True)


def _require(
    x: Tensor,
    codes: Tensor,
    scale: Tensor | None,
    zero: Tensor | None,
    channel: Tensor | None,
    tokens: int,
    lengths: Tensor | None,
) -> PackedCache:
    if x.dim() != 4 or x.dtype not in DTYPES or x.stride(-1) != 1:
        raise QtoolError(
            f"kv_append: x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; expected "
            "float32, float16 or bfloat16 [B, H, t, D] whose channels are adjacent"
        )
    cached = PackedCache("kv_append", codes, channel if codes.dtype == torch.int8 else scale, zero)
    if codes.dtype == torch.int8 and scale is not None:
        raise QtoolError(
            "kv_append: scale is given, but kv8's are those of the channels; pass None"
        )
    batch, heads, added, dim = x.shape
    cached.require(batch, heads, dim, x.device)
    if codes.dtype == torch.uint8 and channel is not None:
        require_tensors(
            "kv_append", x.device, {"channel": (channel, (heads, dim), (torch.float32,))}
        )
    if not added <= tokens <= cached.capacity:
        raise QtoolError(
            f"kv_append: {tokens} tokens, {added} of them new; the cache has room for {cached.capacity}"
        )
    require_lengths("kv_append", lengths, batch, x.device)
    return cached
