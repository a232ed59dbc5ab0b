"""Keys and values of one layer in packed form, and what a checkpoint stores for them.

kv8's scales are static: each block stores ``self_attn.k_scale`` and ``self_attn.v_scale``, float32
``[H, D]``, of the keys after RoPE and the values. The other quantizers compute their parameters from
the tokens and store nothing.

Legend: B batch, H kv heads, T tokens, D head dimension.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from qtool.errors import QtoolError, suggest
from qtool.models import Family, Heads
from qtool.schemes.kv import KV8, KV_QUANTIZERS, KVQuantizer, Packed

SCALES = ("k_scale", "v_scale")


def kv_tensors(kv: str | None, family: Family, heads: Heads) -> dict[str, Tensor]:
    """What a block stores for the KV quantizer ``kv``, by name within the block, on ``meta``.

    Raises:
        QtoolError: an unknown quantizer, or one that cannot hold these heads.
    """
    if kv is None:
        return {}
    if kv not in KV_QUANTIZERS:
        raise QtoolError(f"unknown KV-cache quantizer {kv!r}: {suggest(kv, KV_QUANTIZERS)}")
    if reason := family.refuses.get("kv"):
        raise QtoolError(f"{kv}: a {family.name} model cannot have a quantized KV cache: {reason}")
    if KV_QUANTIZERS[kv].bits == 4 and heads.dim % 2:
        raise QtoolError(f"{kv}: a head dimension of {heads.dim} is odd, 4-bit codes are packed two a byte")
    if not KV_QUANTIZERS[kv].static:
        return {}
    scale = torch.empty(heads.kv, heads.dim, dtype=torch.float32, device="meta")
    return {f"{attention_name(family)}.{name}": scale for name in SCALES}


def attention_name(family: Family) -> str:
    """The name within a block of the module that holds the attention linears."""
    return family.attention.k.rpartition(".")[0]


def kv_quantizers(kv: str, scales: Callable[[str], Tensor]) -> tuple[KVQuantizer, KVQuantizer]:
    """The quantizers of keys and of values; ``scales("k_scale")`` gives a stored scale if ``kv`` has any."""
    if KV_QUANTIZERS[kv] is KV8:
        return KV8.of_scale(scales("k_scale")), KV8.of_scale(scales("v_scale"))
    return KV_QUANTIZERS[kv](), KV_QUANTIZERS[kv]()


class PackedTokens:
    """The keys, or the values, of a layer: codes that are never quantized again, and an incomplete last group.

    Attributes:
        packed: what the quantizer made of the whole groups, tokens at dimension 2; empty before the first.
        rest: ``[B, H, R, D]``, the last R < ``quantizer.tokens`` tokens as they came; None before the first.
    """

    def __init__(self, quantizer: KVQuantizer) -> None:
        self.quantizer = quantizer
        self.packed: Packed = {}
        self.rest: Tensor | None = None

    def append(self, x: Tensor) -> Tensor:
        """Store ``x [B, H, T, D]``; returns all tokens so far as they now read, in the dtype of ``x``."""
        pending = x if self.rest is None else torch.cat([self.rest, x], 2)
        whole = pending.shape[2] // self.quantizer.tokens * self.quantizer.tokens
        if whole:
            new = self.quantizer.quantize(pending[:, :, :whole])
            self.packed = {n: torch.cat([self.packed[n], t], 2) for n, t in new.items()} if self.packed else new
        self.rest = pending[:, :, whole:].clone()  # a view would keep all of ``pending`` in memory
        return self.read()

    def read(self) -> Tensor:
        """All tokens ``[B, H, T, D]``: the dequantized groups, then the rest."""
        assert self.rest is not None, "nothing was appended"
        if not self.packed:
            return self.rest
        groups = self.quantizer.dequantize(self.packed, self.rest.dtype)
        return torch.cat([groups, self.rest], 2) if self.rest.shape[2] else groups

    @property
    def tokens(self) -> int:
        """T."""
        return self._grouped + (self.rest.shape[2] if self.rest is not None else 0)

    @property
    def nbytes(self) -> int:
        """Bytes that are really held, to the end of each tensor's storage."""
        return sum(t.untyped_storage().nbytes() for t in self._tensors().values())

    @property
    def nbytes_16bit(self) -> int:
        """Bytes of the same tokens in 16 bits."""
        if self.rest is None:
            return 0
        batch, heads, _, dim = self.rest.shape
        return 2 * batch * heads * self.tokens * dim

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every held tensor by ``change`` of it: another batch order, another device."""
        changed = {name: change(tensor) for name, tensor in self._tensors().items()}
        self.rest = changed.pop("rest", None)
        self.packed = changed

    def crop(self, tokens: int) -> None:
        """Forget all but the first ``tokens``. Of a group that is cut, what stays is kept dequantized."""
        if tokens >= self.tokens:
            return
        assert self.rest is not None
        grouped, kept = self._grouped, min(self._grouped, tokens // self.quantizer.tokens * self.quantizer.tokens)
        self.rest = self.read()[:, :, kept:tokens].clone()
        cut = {n: t[:, :, : t.shape[2] * kept // grouped].clone() for n, t in self.packed.items()}
        self.packed = cut if kept else {}

    @property
    def _grouped(self) -> int:
        return self.packed["codes"].shape[2] if self.packed else 0

    def _tensors(self) -> dict[str, Tensor]:
        return self.packed | ({"rest": self.rest} if self.rest is not None else {})
