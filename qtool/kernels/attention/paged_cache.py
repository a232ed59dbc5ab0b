"""A packed cache in pages of 64 tokens, as serving engines hand them out: its layout and checks.

A page holds, head by head, the codes of 64 keys, the codes of 64 values, and for kv4 the 64 scales
and the 64 zero points of the keys and then of the values, in float16. kv8 leaves that room unused,
since its scales belong to the channels. So a page has, with b bytes of codes per token of a head,

    heads * 64 * (2 b + 8) bytes

and a token of kv4 ``heads * 2 * (D/2 + 4)``. A *slot* is ``page * 64 + token in it``; row b of the
*table* names the pages of sequence b in their order.

Legend: N pages, B sequences, M pages a sequence, H kv heads, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.attention.packed_cache import TOKENS, PackedCache, require_head_dim
from qtool.kernels.checks import require_tensors
from qtool.kernels.dtypes import HALF

#: bytes of a token's two scales and two zero points
SCALE_BYTES = 8


def head_bytes(bits: int, dim: int) -> int:
    """Bytes of one kv head in a page."""
    return TOKENS * (2 * (dim * bits // 8) + SCALE_BYTES)


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of a layer.

    Attributes:
        op: name of the calling op, for messages.
        pages: uint8 ``[N, H, head_bytes]``; pages may lie apart.
        dim: D.
        k_scale: kv8: float32 ``[H, D]``, of keys; kv4: None.
        v_scale: kv8: float32 ``[H, D]``, of values; kv4: None.
    """

    op: str
    pages: Tensor
    dim: int
    k_scale: Tensor | None
    v_scale: Tensor | None

    @property
    def bits(self) -> int:
        return 4 if self.k_scale is None else 8

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Views of the keys' and the values' tensors, each ``[N, H, 64, ...]``."""
        token_bytes = self.dim * self.bits // 8
        sizes = [TOKENS * token_bytes] * 2 + [2 * TOKENS] * 4
        codes = torch.uint8 if self.bits == 4 else torch.int8
        parts = self.pages.split(sizes, 2)
        k, v = (part.view(codes).unflatten(2, (TOKENS, token_bytes)) for part in parts[:2])
        if self.bits == 8:
            return {"codes": k}, {"codes": v}
        each = [part.view(torch.float16).unsqueeze(3) for part in parts[2:]]
        keys = {"codes": k, "scale": each[0], "zero": each[1]}
        return keys, {"codes": v, "scale": each[2], "zero": each[3]}

    def dense(self, table: Tensor) -> tuple[PackedCache, PackedCache]:
        """Copies of the keys and values of sequences ``table [B, M]``, capacity ``64 M``."""
        found = []
        for part, scale in zip(self.parts(), (self.k_scale, self.v_scale), strict=True):
            # [B, M, H, 64, ...] -> [B, H, 64 M, ...]
            own = {n: t[table.long()].transpose(1, 2).flatten(2, 3) for n, t in part.items()}
            found.append(
                PackedCache(self.op, own["codes"], own.get("scale", scale), own.get("zero"))
            )
        return found[0], found[1]

    def require(self, heads: int, device: torch.device) -> None:
        """Refuse pages of another layout, and scales that do not fit."""
        pages, dim = self.pages, self.dim
        require_head_dim(self.op, dim)
        size = head_bytes(self.bits, dim)
        fits = pages.dim() == 3 and pages.shape[1:] == (heads, size)
        if not fits or pages.dtype != torch.uint8 or pages.device != device:
            raise QtoolError(
                f"{self.op}: pages is {pages.dtype} {tuple(pages.shape)} on {pages.device}; "
                f"expected uint8 [N, {heads}, {size}] on {device}"
            )
        if pages.stride()[1:] != (size, 1) or pages.stride(0) % 16 or pages.storage_offset() % 16:
            raise QtoolError(
                f"{self.op}: pages has strides {pages.stride()}; a page must be contiguous and "
                "start at a multiple of 16 bytes"
            )
        shape = None if self.k_scale is None else (heads, dim)
        scales = {"k_scale": self.k_scale, "v_scale": self.v_scale}
        require_tensors(
            self.op, device, {name: (s, shape, (torch.float32,)) for name, s in scales.items()}
        )


def require_table(op: str, table: Tensor, batch: int, device: torch.device) -> None:
    """Refuse a table that is not int32 ``[B, M]`` on ``device`` with adjacent columns."""
    fits = table.dim() == 2 and table.shape[0] == batch and table.stride(1) == 1
    if not fits or table.dtype != torch.int32 or table.device != device:
        raise QtoolError(
            f"{op}: table is {table.dtype} {tuple(table.shape)} on {table.device}; expected int32 "
            f"[{batch}, M] on {device} whose columns are adjacent"
        )


def require_keys_and_values(op: str, key: Tensor, value: Tensor) -> None:
    """Refuse new keys and values that are not alike, or that :func:`require_tokens` refuses."""
    require_tokens(op, "key", key)
    require_tokens(op, "value", value)
    if (key.shape, key.dtype) != (value.shape, value.dtype):
        raise QtoolError(
            f"{op}: key is {key.dtype} {tuple(key.shape)}, value {value.dtype} "
            f"{tuple(value.shape)}; both must be alike"
        )


def require_tokens(op: str, name: str, x: Tensor) -> None:
    """Refuse ``x`` unless it is 16-bit ``[T, H, D]`` with adjacent channels and aligned heads."""
    if (
        x.dim() != 3
        or x.dtype not in HALF
        or x.stride(2) != 1
        or x.stride(0) % 8
        or x.stride(1) % 8
    ):
        raise QtoolError(
            f"{op}: {name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}; expected "
            "float16 or bfloat16 [T, H, D] with adjacent channels, rows a multiple of 8 apart"
        )
