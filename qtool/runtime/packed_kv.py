"""Keys and values of one layer in packed form, and the tensors a checkpoint stores for them.

kv8's scales are static: each block stores ``self_attn.k_scale`` and ``self_attn.v_scale``, float32
``[H, D]``, of the keys after RoPE and of the values. kv4 computes scales from the tokens and stores
two tensors, float32 ``[H, D]`` too: ``self_attn.k_offset``, the mean of the keys after RoPE, and
``self_attn.k_importance``, the weights of squared errors of their channels. Without calibration
these are zeros and ones. kv4-channel stores nothing, and neither does a block without attention.

Legend: B batch, H kv heads, T tokens, D head dimension.
"""

import math
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.attention.packed_cache import TOKENS, takes_head_dim
from qtool.models import Family, family_of
from qtool.schemes.kv import KV4, KV8, KV_QUANTIZERS, KVQuantizer, Packed, require_kv

SCALES = KV8.constants
OFFSET, IMPORTANCE = KV4.constants
#: tensors that kv4 stores, and their values without effect
NEUTRAL = {OFFSET: 0.0, IMPORTANCE: 1.0}


def kv_tensors(kv: str | None, family: Family, config: Any) -> dict[str, Tensor]:
    """Tensors that a block stores for the KV quantizer ``kv``, by name within it, on ``meta``.

    Args:
        family: the block's; a block without a KV cache stores nothing.
        config: the settings of the model.

    Raises:
        QtoolError: an unknown quantizer, or one that cannot hold the model's keys and values.
    """
    if kv is None:
        return {}
    quantizer = require_kv(kv)
    if reason := family.refuses.get("kv"):
        raise QtoolError(f"{kv}: {family.name} models cannot have a quantized KV cache: {reason}")
    if (cache := family.kv_cache) is None:
        return {}
    heads, dim = cache.heads(config)
    if quantizer.bits == 4 and dim % 2:
        raise QtoolError(
            f"{kv}: a head dimension of {dim} is odd, 4-bit codes are packed two a byte"
        )
    each = torch.empty(heads, dim, dtype=torch.float32, device="meta")
    return {cache.tensor(name): each for name in quantizer.constants}


def missing_kv_tensors(kv: str | None, config: Any, stored: Container[str]) -> list[str]:
    """The tensors of the cache ``kv`` that are not among the names ``stored`` of a checkpoint.

    Raises:
        QtoolError: as :func:`kv_tensors` does.
    """
    family = family_of(config)
    settings = family.settings(config)
    return [
        name
        for block, own in enumerate(family.of_blocks(settings))
        for within in kv_tensors(kv, own, settings)
        if (name := f"{family.blocks}.{block}.{within}") not in stored
    ]


def kv_quantizers(kv: str, stored: Callable[[str], Tensor]) -> tuple[KVQuantizer, KVQuantizer]:
    """The quantizers of keys and of values.

    ``stored("k_scale")`` gives a stored tensor if ``kv`` has any.
    """
    if KV_QUANTIZERS[kv] is KV8:
        return KV8(stored("k_scale")), KV8(stored("v_scale"))
    if KV_QUANTIZERS[kv] is KV4:
        return KV4(stored(OFFSET), stored(IMPORTANCE)), KV4()
    return KV_QUANTIZERS[kv](), KV_QUANTIZERS[kv]()


class PackedTokens:
    """The keys or the values of a layer: codes, and the tokens of an incomplete last group.

    The packed tensors have room for further tokens and grow by a half, so that on average appending
    a token costs the same at any length.

    Attributes:
        rest: ``[B, H, R, D]``, the last R < ``quantizer.tokens`` tokens, unquantized; None before
            the first token.
    """

    def __init__(self, quantizer: KVQuantizer) -> None:
        self.quantizer = quantizer
        self.rest: Tensor | None = None
        # the quantizer's tensors, with ``capacity`` tokens at dimension 2
        self._room: Packed = {}
        self._grouped = 0

    def append(self, x: Tensor) -> Tensor:
        """Store ``x [B, H, T, D]``; returns all tokens so far, read back in ``x``'s dtype."""
        self.store(x)
        return self.read()

    def store(self, x: Tensor) -> None:
        """Quantize the whole groups of the rest and ``x [B, H, T, D]``; keep the new rest."""
        pending = x if self.rest is None or not self.rest.shape[2] else torch.cat([self.rest, x], 2)
        whole = pending.shape[2] // self.quantizer.tokens * self.quantizer.tokens
        if whole:
            self._reserve(self._grouped + whole, pending)
            self._quantize(pending[:, :, :whole])
        self.rest = pending[:, :, whole:].clone()  # a view would keep all of ``pending`` in memory

    def read(self) -> Tensor:
        """All tokens ``[B, H, T, D]``: the dequantized groups, then the rest."""
        assert self.rest is not None, "nothing was appended"
        if not self._grouped:
            return self.rest
        groups = self.quantizer.dequantize(self.packed, self.rest.dtype)
        return torch.cat([groups, self.rest], 2) if self.rest.shape[2] else groups

    @property
    def packed(self) -> Packed:
        """The quantizer's tensors of the whole groups, tokens at dimension 2."""
        return self._first(self._grouped) if self._grouped else {}

    @property
    def tokens(self) -> int:
        """T."""
        return self._grouped + (self.rest.shape[2] if self.rest is not None else 0)

    @property
    def capacity(self) -> int:
        """Tokens that the packed tensors have room for."""
        return self._room["codes"].shape[2] if self._room else 0

    def kernel_arguments(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """``codes``, ``scale`` and ``zero`` with their room, as ``qtool::kv_attention`` takes them.

        kv4 and kv8 only.
        """
        scale = self.quantizer.scale if isinstance(self.quantizer, KV8) else self._room["scale"]
        return self._room["codes"], scale, self._room.get("zero")

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by ``change`` of it, for another batch order or another device."""
        self._room = {name: change(tensor) for name, tensor in self._room.items()}
        self.rest = None if self.rest is None else change(self.rest)

    def crop(self, tokens: int) -> None:
        """Forget all but the first ``tokens``; a group that is cut is kept dequantized."""
        if tokens >= self.tokens:
            return
        assert self.rest is not None
        kept = min(self._grouped, tokens // self.quantizer.tokens * self.quantizer.tokens)
        self.rest = self.read()[:, :, kept:tokens].clone() if tokens > kept else self.rest[:, :, :0]
        self._grouped = kept

    def _reserve(self, tokens: int, like: Tensor) -> None:
        """Make room for ``tokens`` tokens of the shape of ``like``."""
        if tokens <= self.capacity:
            return
        unit = math.lcm(TOKENS, self.quantizer.tokens)
        capacity = -(-max(tokens, self.capacity * 3 // 2) // unit) * unit
        groups, old = capacity // self.quantizer.tokens, self.packed
        one_group = self.quantizer.quantize(like[:, :, : self.quantizer.tokens])
        self._room = {
            name: t.new_empty(*t.shape[:2], t.shape[2] * groups, *t.shape[3:])
            for name, t in one_group.items()
        }
        for name, tensor in old.items():
            self._room[name][:, :, : tensor.shape[2]] = tensor

    def _quantize(self, x: Tensor) -> None:
        """Append the whole groups ``x`` to the packed tensors, which have room for them."""
        self._grouped += x.shape[2]
        if x.device.type == "cuda" and kernel_packs(self.quantizer, x):
            from qtool.kernels.attention.kv_append import kv_append

            codes, scale, zero = self.kernel_arguments()
            if isinstance(self.quantizer, KV4):
                x = self.quantizer.centred(x) if self.quantizer.offset is not None else x
                importance = self.quantizer.importance
                importance = None if importance is None else importance.to(x.device, torch.float32)
                kv_append(x, codes, scale, zero, importance, self._grouped, None)
            else:
                kv_append(x, codes, None, None, scale, self._grouped, None)
            return
        for name, tensor in self.quantizer.quantize(x).items():
            held = self._first(self._grouped)[name]
            held[:, :, held.shape[2] - tensor.shape[2] :] = tensor

    def _first(self, tokens: int) -> Packed:
        """The packed tensors' views of the first ``tokens``."""
        return {
            name: t[:, :, : t.shape[2] * tokens // self.capacity] for name, t in self._room.items()
        }


def kernel_packs(quantizer: KVQuantizer, x: Tensor) -> bool:
    """Whether ``qtool::kv_append`` packs ``x [B, H, T, D]``, on a GPU, as ``quantizer`` does."""
    return (
        isinstance(quantizer, KV4 | KV8)
        and takes_head_dim(x.shape[3])
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
    )
