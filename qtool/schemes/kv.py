"""KV-cache quantizers: keys (after RoPE) and values ``[B, H, T, D]`` as 8-bit or packed 4-bit codes.

    kv8          s8, static, per head and channel: s[h, d] = max|X| / 127 of the calibration data
                 (LiquidGEMM section 6, LiquidServe)
    kv4          u4, dynamic, per token and head (QServe section 4.1)
    kv4-channel  u4 per channel, by groups of tokens (COMET section 3.2)

The 4-bit ones are asymmetric, with scale and zero point in fp16 beside the codes:

    s = (max - min) / 15    z = -min / s    Q = clamp(rne(X / s + z), 0, 15)    X' = (Q - z) * s

The zero point is a real number, so the range need not hold zero: keys have channels far from it.
kv4 takes a calibrated mean of each channel away from the keys before, and adds it after: tokens of a head share
the range of 64 or 128 channels, which a channel far from zero would widen for all. (Attention without
soft-capping does not notice if a kernel leaves the addition out: it moves every score of a query alike.)
``s`` is at least max|X| / 2**14, beyond which z would leave fp16; a constant group is so kept too.
Codes are packed two a byte, the even channel in the low nibble.

Legend: B batch, H heads, T tokens, D head dimension.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.schemes.base import stored_scale

Packed = dict[str, Tensor]


class KVQuantizer(ABC):
    """Codes and parameters of keys or values; ``tokens`` of them are quantized together."""

    name: ClassVar[str]
    bits: ClassVar[int]
    #: its scales are constants of the model, from calibration
    static: ClassVar[bool] = False
    tokens: int = 1

    @abstractmethod
    def quantize(self, x: Tensor) -> Packed:
        """``codes`` (and ``scale``, ``zero`` where they are dynamic) of ``x [B, H, T, D]``.

        Every tensor has the token dimension at 2, so that a cache appends by concatenation there.
        """

    @abstractmethod
    def dequantize(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values ``[B, H, T, D]`` that the codes stand for."""

    def bits_per_value(self, head_dim: int) -> float:
        """Bits stored a value, scales and zero points included; static scales cost nothing per token."""
        one = self.quantize(torch.zeros(1, 1, self.tokens, head_dim))
        return 8 * sum(t.numel() * t.element_size() for t in one.values()) / (self.tokens * head_dim)


class KV8(KVQuantizer):
    """``codes`` int8 ``[B, H, T, D]``.

    Args:
        amax: largest magnitude of each head and channel ``[H, D]`` over the calibration data.
    """

    name = "kv8"
    bits = 8
    static = True

    def __init__(self, amax: Tensor, scale_dtype: torch.dtype = torch.float32) -> None:
        if not amax.is_meta and not torch.isfinite(amax).all():
            raise QtoolError("kv8: the calibration maxima hold NaN or Inf")
        scale = torch.where(amax > 0, amax.float() / 127, 1.0)
        self.scale = stored_scale(scale, scale_dtype)  # [H, D]

    @classmethod
    def of_scale(cls, scale: Tensor) -> "KV8":
        """The quantizer of a stored ``scale [H, D]``, exactly."""
        made = cls.__new__(cls)
        made.scale = scale
        return made

    def quantize(self, x: Tensor) -> Packed:
        codes = torch.round(x.float() / self._scale(x)).clamp_(-127, 127)
        return {"codes": codes.to(torch.int8)}

    def dequantize(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = packed["codes"]
        return (codes.float() * self._scale(codes)).to(dtype)

    def bits_per_value(self, head_dim: int) -> float:
        return 8.0

    def _scale(self, like: Tensor) -> Tensor:
        return self.scale.to(like.device, torch.float32)[:, None]  # [H, 1, D]


class KV4(KVQuantizer):
    """``codes`` uint8 ``[B, H, T, D/2]``, ``scale`` and ``zero`` fp16 ``[B, H, T, 1]``.

    Args:
        offset: ``[H, D]``, taken from every token before it is quantized and added again after; None: nothing.
    """

    name = "kv4"
    bits = 4

    def __init__(self, offset: Tensor | None = None) -> None:
        self.offset = offset

    def quantize(self, x: Tensor) -> Packed:
        codes, scale, zero = quantize_asymmetric(self.centred(x), dim=3)
        return {"codes": pack_nibbles(codes), "scale": scale, "zero": zero}

    def dequantize(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = unpack_nibbles(packed["codes"]).float()
        return ((codes - packed["zero"].float()) * packed["scale"].float() + self._offset(codes)).to(dtype)

    def centred(self, x: Tensor) -> Tensor:
        """``x [B, H, T, D]`` less the offset, float32: what the codes stand for."""
        return x.float() - self._offset(x)

    def _offset(self, like: Tensor) -> Tensor | float:
        return 0.0 if self.offset is None else self.offset.to(like.device, torch.float32)[:, None]  # [H, 1, D]


class KV4Channel(KVQuantizer):
    """``codes`` uint8 ``[B, H, T, D/2]``, ``scale`` and ``zero`` fp16 ``[B, H, T/tokens, D]``.

    Args:
        tokens: tokens a group; a cache keeps the last, incomplete group in 16 bits.
    """

    name = "kv4-channel"
    bits = 4

    def __init__(self, tokens: int = 64) -> None:
        if tokens < 1:
            raise QtoolError(f"kv4-channel: groups of {tokens} tokens; expected 1 or more")
        self.tokens = tokens

    def quantize(self, x: Tensor) -> Packed:
        if x.shape[2] % self.tokens:
            raise QtoolError(f"kv4-channel: {x.shape[2]} tokens are not whole groups of {self.tokens}")
        codes, scale, zero = quantize_asymmetric(x.unflatten(2, (-1, self.tokens)), dim=3)
        return {"codes": pack_nibbles(codes.flatten(2, 3)), "scale": scale.squeeze(3), "zero": zero.squeeze(3)}

    def dequantize(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = unpack_nibbles(packed["codes"]).float().unflatten(2, (-1, self.tokens))
        values = (codes - packed["zero"].float().unsqueeze(3)) * packed["scale"].float().unsqueeze(3)
        return values.flatten(2, 3).to(dtype)


def quantize_asymmetric(x: Tensor, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes u8 0..15 of ``x``, and fp16 scale and zero point shared along ``dim`` (kept, size 1)."""
    x = x.float()
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    step = torch.maximum((high - low) / 15, torch.maximum(low.abs(), high.abs()) / 2**14)
    scale = stored_scale(torch.where(step > 0, step, 1.0), torch.float16)
    zero = (-low / scale.float()).to(torch.float16)
    codes = torch.round(x / scale.float() + zero.float()).clamp_(0, 15)
    return codes.to(torch.uint8), scale, zero


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes u8 0..15 ``[..., D]`` as bytes ``[..., D/2]``, the even channel in the low nibble."""
    if codes.shape[-1] % 2:
        raise QtoolError(f"a head dimension of {codes.shape[-1]} is odd: 4-bit codes are packed two a byte")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_nibbles`."""
    return torch.stack([packed & 0x0F, packed >> 4], -1).flatten(-2)


KV_QUANTIZERS: dict[str, type[KVQuantizer]] = {kv.name: kv for kv in (KV8, KV4, KV4Channel)}
