"""``qtool::kv_append``: new keys or values, quantized straight into a preallocated packed cache.

It stores the bytes that :mod:`qtool.schemes.kv` computes: kv4's codes, scales and zero points, or
kv8's codes.

Legend: B batch, H kv heads, C capacity and t new tokens, D head dimension.
"""

import struct
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.attention.packed_cache import PackedCache
from qtool.kernels.build import ARCHS, Build, Source, cubin
from qtool.kernels.checks import optional, require_tensors
from qtool.kernels.dtypes import FLOATS, NUMBERS
from qtool.kernels.launch import launch, load, pointers, require_ampere
from qtool.kernels.op import operator
from qtool.schemes.kv import KV4

OP = "kv_append"
THREADS = 128
#: channels of a thread
HELD = 16
#: csrc/attention/kv_append.cu
PARAMETERS = struct.Struct("<6Q3q5i4x")


class KvAppend(NamedTuple):
    """Write ``x`` as the last t of the cache's tokens, in place.

    Args:
        x: ``[B, H, t, D]``, float32, float16 or bfloat16, channels adjacent.
        codes: kv4 uint8 ``[B, H, C, D/2]``, kv8 int8 ``[B, H, C, D]``.
        scale: kv4: float16 ``[B, H, C, 1]``.
        zero: kv4: float16 ``[B, H, C, 1]``.
        channel: float32 ``[H, D]``; kv8: scales; kv4: weights of the squared errors of each
            channel, None: all equal.
        tokens: tokens of every sequence after the call, or the most of any if there are
            ``lengths``.
        lengths: int32 ``[B]``, tokens of each sequence after the call; a GPU skips tokens whose
            place is outside 0..C.

    Raises:
        QtoolError: for a wrong dtype, shape, stride, device or number of tokens; one sentence.
    """

    x: Tensor
    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    channel: Tensor | None
    tokens: int
    lengths: Tensor | None

    @property
    def cached(self) -> PackedCache:
        """The tensors that are written to."""
        static = self.codes.dtype == torch.int8
        return PackedCache(OP, self.codes, self.channel if static else self.scale, self.zero)

    def require(self) -> None:
        x, codes, cached = self.x, self.codes, self.cached
        if x.dim() != 4 or x.dtype not in FLOATS or x.stride(-1) != 1:
            raise QtoolError(
                f"{OP}: x is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; expected "
                "float32, float16 or bfloat16 [B, H, t, D] whose channels are adjacent"
            )
        if codes.dtype == torch.int8 and (self.scale is not None or self.channel is None):
            raise QtoolError(f"{OP}: kv8's scales are given as channel; scale must be None")
        batch, heads, added, dim = x.shape
        cached.require(batch, heads, dim, x.device)
        if not added <= self.tokens <= cached.capacity:
            raise QtoolError(
                f"{OP}: {self.tokens} tokens, {added} of them new; "
                f"the cache has room for {cached.capacity}"
            )
        expected = {"lengths": optional(self.lengths, (batch,), (torch.int32,))}
        if cached.bits == 4:
            expected["channel"] = optional(self.channel, (heads, dim), (torch.float32,))
        require_tensors(OP, x.device, expected)

    def empty(self) -> None:
        return None

    def reference(self) -> None:
        x, cached, lengths = self.x, self.cached, self.lengths
        ends = [self.tokens] * len(x) if lengths is None else lengths.tolist()
        quantizer = KV4(importance=self.channel) if cached.bits == 4 else cached.quantizer
        for name, new in quantizer.quantize(x).items():
            stored = {"codes": self.codes, "scale": self.scale, "zero": self.zero}[name]
            assert stored is not None
            for row, end in enumerate(ends):
                first, kept = max(end - x.shape[2], 0), max(min(end, cached.capacity), 0)
                if kept > first:
                    before = end - x.shape[2]
                    stored[row, :, first:kept] = new[row, :, first - before : kept - before]

    def launch(self, out: None) -> None:
        x, cached, device = self.x, self.cached, self.x.device
        batch, heads, added, dim = x.shape
        items = batch * heads * added
        if items == 0:
            return
        if any(stride % 8 for stride in x.stride()[:3]):
            x = x.contiguous()
        arch, overlap = require_ampere(OP, device)
        x, channel = aligned(x), self.channel if self.channel is None else aligned(self.channel)
        tensors = (x, self.codes, channel, self.scale, self.zero, self.lengths)
        numbers = (*x.stride()[:3], items, heads, added, self.tokens, cached.capacity)
        parameters = PARAMETERS.pack(*pointers(*tensors), *numbers)
        kernel = kernel_of(cached.bits, dim, x.dtype, arch, device.index)
        blocks = blocks_of(items, dim)
        launch(kernel, blocks, THREADS, 0, parameters, device, overlap=overlap)


kv_append = operator(OP, KvAppend, mutates=("codes", "scale", "zero"))


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, copied unless the kernel can read 16 bytes of it at once."""
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()


def blocks_of(items: int, dim: int) -> int:
    """Blocks for ``items`` tokens of heads; each item has a power of two of threads."""
    lanes = 1 << (-(-dim // HELD) - 1).bit_length()
    return -(-items * lanes // THREADS)


@cache
def kernel_of(
    bits: int, dim: int, dtype: torch.dtype, arch: str, device: int, *, paged: bool = False
) -> int:
    """The handle of the kernel for a cache, dense or paged."""
    return load(cubin(*definition(bits, dim, dtype, paged), arch), "kv_append", 0, device)


def definition(bits: int, dim: int, dtype: torch.dtype, paged: bool = False) -> Source:
    """Source name, prologue and macros of one kernel."""
    defines = {"BITS": bits, "DIM": dim, "DTYPE": NUMBERS[dtype], "PAGED": int(paged)}
    return "attention/kv_append", "", defines


def builds() -> Iterator[Build]:
    """Both caches and every dtype, dense and paged, on each architecture."""
    variants = product(ARCHS, (4, 8), FLOATS, (False, True))
    for arch, bits, dtype, paged in variants:
        name = f"kv_append kv{bits} {str(dtype).removeprefix('torch.')}{' paged' * paged}"
        yield Build(name, arch, definition(bits, 128, dtype, paged), 4 * THREADS, calls=True)
