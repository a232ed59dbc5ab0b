"""``qtool::kv_append_paged``: new keys and values, quantized straight into pages.

It stores the bytes that :mod:`qtool.schemes.kv` computes, as
:mod:`qtool.kernels.attention.kv_append` does, in one launch for keys and values.

Legend: T tokens, H kv heads, D head dimension.
"""

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from qtool.kernels.attention.kv_append import THREADS, aligned, blocks_of, kernel_of
from qtool.kernels.attention.packed_cache import TOKENS
from qtool.kernels.attention.paged_cache import PagedCache, require_keys_and_values
from qtool.kernels.checks import Expected, optional, require_tensors
from qtool.kernels.launch import launch, pointers, require_ampere
from qtool.kernels.op import Launch, operator
from qtool.schemes.kv import KV4, KV8, KVQuantizer

OP = "kv_append_paged"
#: csrc/attention/kv_append.cu
PARAMETERS = struct.Struct("<7Q5q4i")


class KvAppendPaged(NamedTuple):
    """Write keys and values to their slots, in place.

    Args:
        key: float16 or bfloat16 ``[T, H, D]`` with any strides between tokens and heads.
        value: shaped as ``key``.
        pages: uint8 ``[N, H, head_bytes]`` (:mod:`qtool.kernels.attention.paged_cache`).
        slots: int64 ``[T]``; below 0: the token is not stored.
        k_scale: kv8: float32 ``[H, D]``, of keys; kv4: None.
        v_scale: kv8: float32 ``[H, D]``, of values; kv4: None.
        k_offset: kv4: float32 ``[H, D]``, as :class:`qtool.schemes.kv.KV4` takes it for keys, or
            None.
        k_importance: as ``k_offset``.

    Raises:
        QtoolError: for a wrong dtype, shape, stride or device; one sentence.
    """

    key: Tensor
    value: Tensor
    pages: Tensor
    slots: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    k_offset: Tensor | None
    k_importance: Tensor | None

    @property
    def cache(self) -> PagedCache:
        return PagedCache(OP, self.pages, self.key.shape[2], self.k_scale, self.v_scale)

    def require(self) -> None:
        key, value, device = self.key, self.value, self.key.device
        require_keys_and_values(OP, key, value)
        tokens, heads, dim = key.shape
        self.cache.require(heads, device)
        shape = (heads, dim) if self.cache.bits == 4 else None
        expected: dict[str, Expected] = {
            "slots": (self.slots, (tokens,), (torch.int64,)),
            "k_offset": optional(self.k_offset, shape, (torch.float32,)),
            "k_importance": optional(self.k_importance, shape, (torch.float32,)),
        }
        require_tensors(OP, device, expected)

    def empty(self) -> None:
        return None

    def reference(self) -> None:
        stored = self.slots >= 0
        page, within = self.slots[stored] // TOKENS, self.slots[stored] % TOKENS
        quantizers: tuple[KVQuantizer, KVQuantizer] = (
            KV4(self.k_offset, self.k_importance),
            KV4(),
        )
        if self.k_scale is not None and self.v_scale is not None:
            quantizers = KV8(self.k_scale), KV8(self.v_scale)
        each = zip((self.key, self.value), self.cache.parts(), quantizers, strict=True)
        for x, parts, quantizer in each:
            new = quantizer.quantize(x[stored].transpose(0, 1).unsqueeze(0))  # [1, H, T, ...]
            for name, part in parts.items():  # [N, H, 64, ...]
                part[page, :, within] = new[name][0].transpose(0, 1)

    def plan(self) -> Launch:
        device, bits = self.key.device, self.cache.bits
        _, heads, dim = self.key.shape
        arch, overlap = require_ampere(OP, device)
        kernel = kernel_of(bits, dim, self.key.dtype, arch, device.index, paged=True)

        def start(call: KvAppendPaged, out: None) -> None:
            tokens, pages = call.key.shape[0], call.pages
            items = 2 * tokens * heads
            if items == 0:
                return
            channel = (call.k_importance, None) if bits == 4 else (call.k_scale, call.v_scale)
            key, value = aligned(call.key), aligned(call.value)
            constants = [None if t is None else aligned(t) for t in (*channel, call.k_offset)]
            parameters = PARAMETERS.pack(
                *pointers(key, value, *constants, call.slots, pages),
                *(*key.stride()[:2], *value.stride()[:2], pages.stride(0)),
                *(items, heads, tokens, pages.shape[0]),
            )
            launch(kernel, blocks_of(items, dim), THREADS, 0, parameters, device, overlap=overlap)

        return start


kv_append_paged = operator(OP, KvAppendPaged, mutates=("pages",), rows=("key", "value", "slots"))
