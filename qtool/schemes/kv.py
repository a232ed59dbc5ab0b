"""KV-cache quantizers: keys (after RoPE) and values as 8-bit or packed 4-bit codes.

    kv8          s8, static, per head and channel: s[h, d] = max|X| / 127 of the calibration data,
                 Q = clamp(rne(X / s), -127, 127), X' = Q * s (LiquidGEMM section 6, LiquidServe)
    kv4          u4, dynamic, per token and head (QServe section 4.1)
    kv4-channel  u4 per channel, by groups of 64 tokens, the last ones in 16 bits until they are 64
                 (COMET section 3.2)

The 4-bit ones are asymmetric, with scale and zero point in fp16 beside the codes:

    s = 0.95 (max - min) / 15    z = 7.5 - (max + min) / 2s
    Q = clamp(rne(X / s + z), 0, 15)    X' = (Q - z) * s

QServe uses the whole range. Beyond the paper, the line through the codes is fitted by least squares
and the values are rounded again on it, three times or until that brings them no nearer to X
(:func:`refit`). This gives an eighth less squared error than the whole range, in the same format.
Squared errors of a key are weighted per channel by the power of the queries there, if that was
calibrated: it differs a hundredfold within a head. The zero point is a real number, so the range
need not hold zero: keys have channels far from it. kv4 subtracts a calibrated mean of each channel
from the keys before it quantizes them, and adds it when it dequantizes: all 64 or 128 channels of a
token's head share one range, which a channel far from zero would widen for all. (A kernel may leave
the addition out unless attention is soft-capped, since it adds one number to all scores of a
query.) ``s`` is at least max|X| / 2**14, since below that z would leave fp16; this keeps a constant
group too. Codes are packed two a byte, the even channel in the low nibble.

Legend: B batch, H heads, T tokens, D head dimension.
"""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from qtool.errors import QtoolError, require_text, suggest
from qtool.schemes.base import stored_scale

Packed = dict[str, Tensor]
#: share of the range of values that the 15 steps cover before the fit
RANGE = 0.95
#: the most fits of the line through the codes
ROUNDS = 3
#: channels that are summed first, as in the kernel that appends (csrc/attention/kv_append.cu)
FIRST_CHANNELS = 8


class KVQuantizer(ABC):
    """Codes and parameters of keys or values."""

    #: its name in recipes, in checkpoints and for ``--kv``
    name: ClassVar[str]
    #: bits of a code; codes of 4 bits are packed two a byte, so that D must be even
    bits: ClassVar[int]
    #: whether its scales are constants of the model, from calibration
    static: ClassVar[bool] = False
    #: names of the tensors ``[H, D]`` that a checkpoint stores for it in each block
    constants: ClassVar[tuple[str, ...]] = ()
    #: tokens that are quantized together; a cache keeps fewer in 16 bits
    tokens: int = 1

    @abstractmethod
    def quantize(self, x: Tensor) -> Packed:
        """``codes`` of ``x [B, H, T, D]``, and ``scale`` and ``zero`` if they are dynamic.

        Every tensor has the token dimension at 2, so that a cache appends by concatenation there.
        """

    @abstractmethod
    def dequantize(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values ``[B, H, T, D]`` that the codes stand for."""


class KV8(KVQuantizer):
    """``codes`` int8 ``[B, H, T, D]``.

    Args:
        scale: ``[H, D]``, as :func:`static_scale` makes it.
    """

    name = "kv8"
    bits = 8
    static = True
    constants = "k_scale", "v_scale"

    def __init__(self, scale: Tensor) -> None:
        self.scale = scale

    def quantize(self, x: Tensor) -> Packed:
        codes = torch.round(x.float() / self._scale(x)).clamp_(-127, 127)
        return {"codes": codes.to(torch.int8)}

    def dequantize(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = packed["codes"]
        return (codes.float() * self._scale(codes)).to(dtype)

    def _scale(self, like: Tensor) -> Tensor:
        return self.scale.to(like.device, torch.float32)[:, None]  # [H, 1, D]


def static_scale(amax: Tensor) -> Tensor:
    """kv8's scale float32 ``[H, D]`` of each head and channel.

    Args:
        amax: ``[H, D]``, the largest magnitude there over the calibration data.

    Raises:
        QtoolError: one is NaN or Inf.
    """
    if not torch.isfinite(amax).all():
        raise QtoolError("kv8: the calibration maxima hold NaN or Inf")
    return stored_scale(torch.where(amax > 0, amax.float() / 127, 1.0), torch.float32)


class KV4(KVQuantizer):
    """``codes`` uint8 ``[B, H, T, D/2]``, ``scale`` and ``zero`` fp16 ``[B, H, T, 1]``.

    Args:
        offset: ``[H, D]``, subtracted from every token before it is quantized and added when it is
            read; None: no offset.
        importance: float32 ``[H, D]``, weights of the squared errors of each channel; None: all
            equal.
    """

    name = "kv4"
    bits = 4
    constants = "k_offset", "k_importance"

    def __init__(self, offset: Tensor | None = None, importance: Tensor | None = None) -> None:
        self.offset, self.importance = offset, importance

    def quantize(self, x: Tensor) -> Packed:
        importance = self.importance
        if importance is not None:
            importance = importance.to(x.device, torch.float32)[:, None]  # [H, 1, D]
        codes, scale, zero = quantize_asymmetric(self.centred(x), importance)
        return {"codes": pack_nibbles(codes), "scale": scale, "zero": zero}

    def dequantize(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = unpack_nibbles(packed["codes"]).float()
        values = (codes - packed["zero"].float()) * packed["scale"].float() + self._offset(codes)
        return values.to(dtype)

    def centred(self, x: Tensor) -> Tensor:
        """``x [B, H, T, D]`` less the offset, float32, which is what the codes stand for."""
        return x.float() - self._offset(x)

    def _offset(self, like: Tensor) -> Tensor | float:
        # [H, 1, D]
        return 0.0 if self.offset is None else self.offset.to(like.device, torch.float32)[:, None]


class KV4Channel(KVQuantizer):
    """``codes`` uint8 ``[B, H, T, D/2]``, ``scale`` and ``zero`` fp16 ``[B, H, T/tokens, D]``.

    Args:
        tokens: tokens per group; a cache keeps the last, incomplete group in 16 bits.
    """

    name = "kv4-channel"
    bits = 4

    def __init__(self, tokens: int = 64) -> None:
        if tokens < 1:
            raise QtoolError(f"kv4-channel: groups of {tokens} tokens; expected 1 or more")
        self.tokens = tokens

    def quantize(self, x: Tensor) -> Packed:
        if x.shape[2] % self.tokens:
            raise QtoolError(
                f"kv4-channel: {x.shape[2]} tokens are not whole groups of {self.tokens}"
            )
        # [B, H, T/tokens, D, tokens]
        by_channel = x.unflatten(2, (-1, self.tokens)).transpose(3, 4)
        codes, scale, zero = quantize_asymmetric(by_channel)
        codes = codes.transpose(3, 4).flatten(2, 3)
        return {"codes": pack_nibbles(codes), "scale": scale.squeeze(4), "zero": zero.squeeze(4)}

    def dequantize(self, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
        codes = unpack_nibbles(packed["codes"]).float().unflatten(2, (-1, self.tokens))
        scale, zero = (packed[name].float().unsqueeze(3) for name in ("scale", "zero"))
        return ((codes - zero) * scale).flatten(2, 3).to(dtype)


def quantize_asymmetric(
    x: Tensor, importance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes u8 0..15 of ``x [..., n]``, and fp16 scale and zero point ``[..., 1]``.

    ``importance``, which broadcasts to ``x``, weighs the squared errors.
    """
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = torch.maximum((high - low) * (RANGE / 15), torch.maximum(low.abs(), high.abs()) / 2**14)
    scale = stored_scale(torch.where(step > 0, step, 1.0), torch.float16)
    zero = (7.5 - (low + high) * 0.5 / scale.float()).to(torch.float16)
    codes = rounded_on(x, scale, zero)
    for _ in range(ROUNDS):
        codes, scale, zero = refit(x, codes, scale, zero, importance)
    return codes, scale, zero


def rounded_on(x: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Codes u8 0..15 of ``x`` on the line ``(Q - zero) * scale``."""
    return torch.round(x * (1 / scale.float()) + zero.float()).clamp_(0, 15).to(torch.uint8)


def refit(
    x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, importance: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Better codes, scale and zero point of each ``x [..., n]`` float32, or the same.

    With the codes Q, the residual ``r = x - (Q - z) s`` and the importance w, weighted least
    squares moves the line by

        ds = (sum w sum wQr - sum wQ sum wr) / (sum w sum wQ^2 - (sum wQ)^2)
        and at Q = 0 by    (sum wr - ds sum wQ) / sum w

    Codes are rounded on the new line; it is kept where ``sum w r^2`` falls. Sums are computed by
    :func:`halving_sum` and every operation is rounded by itself, so that ``qtool::kv_append`` finds
    the same bytes.
    """
    q, s, z = codes.float(), scale.float(), zero.float()
    w = torch.ones_like(x[..., :1, :]) if importance is None else importance
    left = x - (q - z) * s
    n, first, second = halving_sum(w), halving_sum(w * q), halving_sum(w * q.square())
    spread, total = second * n - first * first, halving_sum(w * left)
    more = torch.where(spread > 0, (halving_sum(w * (q * left)) * n - first * total) / spread, 0.0)
    moved = stored_scale(s + more, torch.float16)
    moved_zero = ((z * s - (total - more * first) / n) / moved.float()).to(torch.float16)
    again = rounded_on(x, moved, moved_zero)
    left_again = x - (again.float() - moved_zero.float()) * moved.float()
    better = halving_sum(w * left_again.square()) < halving_sum(w * left.square())
    return (
        torch.where(better, again, codes),
        torch.where(better, moved, scale),
        torch.where(better, moved_zero, zero),
    )


def halving_sum(x: Tensor) -> Tensor:
    """``x [..., D]`` summed over D (kept, size 1), as ``qtool::kv_append`` adds.

    It adds by halves, first within each eight channels, then the sums of the eights; channels
    beyond D count as zeros.
    """
    eights = 1 << max(0, -(-x.shape[-1] // FIRST_CHANNELS) - 1).bit_length()
    x = torch.nn.functional.pad(x, (0, eights * FIRST_CHANNELS - x.shape[-1])).unflatten(
        -1, (eights, FIRST_CHANNELS)
    )
    for dim in (-1, -2):
        while (size := x.shape[dim]) > 1:
            x = x.narrow(dim, 0, size // 2) + x.narrow(dim, size // 2, size // 2)
    return x.squeeze(-1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes u8 0..15 ``[..., D]`` as bytes ``[..., D/2]``, the even channel in the low nibble."""
    if codes.shape[-1] % 2:
        raise QtoolError(
            f"a head dimension of {codes.shape[-1]} is odd: 4-bit codes are packed two a byte"
        )
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_nibbles`."""
    return torch.stack([packed & 0x0F, packed >> 4], -1).flatten(-2)


KV_QUANTIZERS: dict[str, type[KVQuantizer]] = {kv.name: kv for kv in (KV8, KV4, KV4Channel)}


def require_kv(name: str) -> type[KVQuantizer]:
    """The KV-cache quantizer ``name``.

    Raises:
        QtoolError: an unknown one.
    """
    if require_text("--kv", name) not in KV_QUANTIZERS:
        raise QtoolError(f"unknown --kv {name!r}: {suggest(name, KV_QUANTIZERS)}")
    return KV_QUANTIZERS[name]
