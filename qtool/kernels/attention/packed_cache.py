"""The tensors of a packed cache as the attention kernels take them, and their checks.

Legend: B batch, H kv heads, C capacity in tokens, D head dimension.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.checks import Expected, require_tensors
from qtool.schemes.kv import KV4, KV8, KVQuantizer

#: a capacity is a multiple of it, since the kernels read whole tiles of tokens
TOKENS = 64
#: largest head dimension
MOST_CHANNELS = 256


@dataclass(frozen=True)
class PackedCache:
    """Keys, or values, of a layer: the tensors of :mod:`qtool.schemes.kv` with room for C tokens.

    Attributes:
        op: name of the calling op, for messages.
        codes: kv4 uint8 ``[B, H, C, D/2]``; kv8 int8 ``[B, H, C, D]``.
        scale: kv4 float16 ``[B, H, C, 1]``; kv8 float32 ``[H, D]``.
        zero: kv4 float16 ``[B, H, C, 1]``; kv8 None.
        name: prefix of the tensors' names in messages.
    """

    op: str
    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    name: str = ""

    @property
    def bits(self) -> int:
        return 8 if self.codes.dtype == torch.int8 else 4

    @property
    def capacity(self) -> int:
        """The tokens that it has room for, C."""
        return self.codes.shape[2]

    @property
    def quantizer(self) -> KVQuantizer:
        """The scheme that made the codes."""
        if self.bits == 4:
            return KV4()
        assert self.scale is not None
        return KV8(self.scale)

    def dequantize(self) -> Tensor:
        """The values ``[B, H, C, D]``, float32."""
        named = {"codes": self.codes, "scale": self.scale, "zero": self.zero}
        return self.quantizer.dequantize(
            {name: tensor for name, tensor in named.items() if tensor is not None}
        )

    def require(self, batch: int, heads: int, dim: int, device: torch.device) -> None:
        """Refuse tensors of another number of sequences, heads or channels than given."""
        if self.codes.dim() != 4 or self.codes.dtype not in (torch.int8, torch.uint8):
            raise QtoolError(
                f"{self.op}: {self.name}codes is {self.codes.dtype} {tuple(self.codes.shape)}; "
                "expected uint8 [B, H, C, D/2] (kv4) or int8 [B, H, C, D] (kv8)"
            )
        require_head_dim(self.op, dim)
        if self.capacity % TOKENS:
            raise QtoolError(
                f"{self.op}: room for {self.capacity} tokens; expected a multiple of {TOKENS}"
            )
        four = self.bits == 4
        parameter = (batch, heads, self.capacity, 1)
        expected: dict[str, Expected] = {
            f"{self.name}codes": (
                self.codes,
                (batch, heads, self.capacity, dim * self.bits // 8),
                (torch.uint8 if four else torch.int8,),
            ),
            f"{self.name}scale": (
                self.scale,
                parameter if four else (heads, dim),
                (torch.float16 if four else torch.float32,),
            ),
            f"{self.name}zero": (self.zero, parameter if four else None, (torch.float16,)),
        }
        require_tensors(self.op, device, expected)


def takes_head_dim(dim: int) -> bool:
    """Whether the kernels are compiled for a head dimension."""
    return dim % 16 == 0 and 16 <= dim <= MOST_CHANNELS


def require_head_dim(op: str, dim: int) -> None:
    """Refuse a head dimension that no kernel has."""
    if not takes_head_dim(dim):
        raise QtoolError(
            f"{op}: head dimension {dim}; expected a multiple of 16 up to {MOST_CHANNELS}"
        )
