"""``qtool::kv_gather``: keys and values in 16 bits, for sequences with several new tokens.

For each sequence it writes the dequantized tokens of its pages, then its new tokens unchanged, for
attention over 16-bit keys and values (chunked prefill, a cached prefix).

Legend: B sequences, T new tokens, H kv heads, D head dimension, R rows of room.
"""

import struct
from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.attention.kv_append import aligned
from qtool.kernels.attention.paged_cache import PagedCache, require_keys_and_values, require_table
from qtool.kernels.build import ARCHS, Build, Source, cubin
from qtool.kernels.checks import Expected, optional, require_tensors
from qtool.kernels.dtypes import NUMBERS
from qtool.kernels.launch import launch, load, pointers, require_ampere
from qtool.kernels.op import operator

OP = "kv_gather"
THREADS = 128
#: csrc/attention/kv_gather.cu
PARAMETERS = struct.Struct("<11Q5q5i4x")


class KvGather(NamedTuple):
    """Fill the first ``total`` rows of ``keys`` and ``values``.

    ``pages``, ``table``, ``k_scale``, ``v_scale`` and ``k_offset`` are those of
    ``kv_attention_paged``.

    Args:
        key: keys of the new tokens, float16 or bfloat16 ``[T, H, D]``, sequence by sequence.
        value: as ``key``.
        starts: int32 ``[B + 1]``, where each sequence starts in ``keys``; the last is ``total``.
        fresh: int32 ``[B + 1]``, where its new tokens start in ``key``.
        cached: int32 ``[B]``, the number of its tokens that are read from the pages, at least all
            that are not new.
        keys: ``[R, H, D]`` in the dtype of ``key``.
        values: as ``keys``.
        total: rows to fill.
        window: sliding window; tokens that no query sees become zeros; 0: no window.

    Raises:
        QtoolError: for a wrong dtype, shape, stride or device; one sentence.
    """

    key: Tensor
    value: Tensor
    pages: Tensor
    table: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_offset: Tensor | None
    starts: Tensor
    fresh: Tensor
    cached: Tensor
    keys: Tensor
    values: Tensor
    total: int
    window: int

    @property
    def cache(self) -> PagedCache:
        return PagedCache(OP, self.pages, self.key.shape[2], self.k_scale, self.v_scale)

    @property
    def threads(self) -> int:
        """The number of threads; each has eight channels of a key or a value."""
        return self.total * self.key.shape[1] * 2 * (self.key.shape[2] // 8)

    def require(self) -> None:
        key, device = self.key, self.key.device
        require_keys_and_values(OP, key, self.value)
        _, heads, dim = key.shape
        self.cache.require(heads, device)
        if self.total < 0 or self.window < 0:
            raise QtoolError(
                f"{OP}: total {self.total} and window {self.window}; expected 0 or more"
            )
        if self.threads >= 1 << 31:
            raise QtoolError(f"{OP}: {self.total} tokens of {heads} heads are too many for a call")
        batch = self.cached.shape[:1].numel()
        require_table(OP, self.table, batch, device)
        room = (max(self.total, self.keys.shape[:1].numel()), heads, dim)
        int32, constant = (torch.int32,), (heads, dim) if self.cache.bits == 4 else None
        expected: dict[str, Expected] = {
            "starts": (self.starts, (batch + 1,), int32),
            "fresh": (self.fresh, (batch + 1,), int32),
            "cached": (self.cached, (batch,), int32),
            "keys": (self.keys, room, (key.dtype,)),
            "values": (self.values, room, (key.dtype,)),
            "k_offset": optional(self.k_offset, constant, (torch.float32,)),
        }
        require_tensors(OP, device, expected)

    def empty(self) -> None:
        return None

    def reference(self) -> None:
        dense = [part.dequantize() for part in self.cache.dense(self.table)]  # [B, H, 64 M, D]
        if self.k_offset is not None:
            dense[0] += self.k_offset[:, None]
        for b, cached in enumerate(self.cached.tolist()):
            start, end = self.starts[b : b + 2].tolist()
            first, last = self.fresh[b : b + 2].tolist()
            query = end - start - (last - first)  # position of the first query
            for source, new, out in zip(
                dense, (self.key, self.value), (self.keys, self.values), strict=True
            ):
                out[start : start + cached] = source[b, :, :cached].transpose(0, 1).to(out.dtype)
                out[start + cached : end] = new[first + cached - query : last]
                if self.window:
                    out[start : start + max(0, query - self.window + 1)] = 0

    def launch(self, out: None) -> None:
        key, value, pages, device = self.key, self.value, self.pages, self.key.device
        heads, dim = key.shape[1:]
        if self.threads == 0:
            return
        key, value = aligned(key), aligned(value)
        arch, overlap = require_ampere(OP, device)
        channel = (self.k_offset, None) if self.cache.bits == 4 else (self.k_scale, self.v_scale)
        indices = (self.table, self.starts, self.fresh, self.cached)
        parameters = PARAMETERS.pack(
            *pointers(key, value, self.keys, self.values, *channel, pages, *indices),
            *(*key.stride()[:2], *value.stride()[:2], pages.stride(0)),
            *(self.cached.shape[0], heads, self.total, self.table.stride(0), self.window),
        )
        kernel = _kernel(self.cache.bits, dim, key.dtype, arch, device.index)
        launch(kernel, -(-self.threads // THREADS), THREADS, 0, parameters, device, overlap=overlap)


kv_gather = operator(OP, KvGather, mutates=("keys", "values"))


@cache
def _kernel(bits: int, dim: int, dtype: torch.dtype, arch: str, device: int) -> int:
    return load(cubin(*definition(bits, dim, dtype), arch), "kv_gather", 0, device)


def definition(bits: int, dim: int, dtype: torch.dtype) -> Source:
    """Source name, prologue and macros of one kernel."""
    return "attention/kv_gather", "", {"BITS": bits, "DIM": dim, "DTYPE": NUMBERS[dtype]}


def builds() -> Iterator[Build]:
    """Both caches, on each architecture."""
    for arch, bits in product(ARCHS, (4, 8)):
        yield Build(f"kv_gather kv{bits}", arch, definition(bits, 128, torch.bfloat16), 1024)
