"""The papers' in-register conversions, instruction for instruction, in 32-bit integer arithmetic.

A register is an int64 element 0 .. 2**32 - 1 of a tensor, lane by lane or word by word, as many as
one likes. Each conversion below is the sequence of instructions that a kernel executes, so its
result shows what carries between bytes, sign bits and rounding really do; the tests hold it against
the schemes over every legal input.

The registers come straight from a layout: ``from_bytes(packed["qweight"])``.
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF


# Instructions


def shl(a: Tensor, bits: int) -> Tensor:
    """SHF.L: logical shift left."""
    return (a << bits) & MASK


def shr(a: Tensor, bits: int) -> Tensor:
    """SHF.R.U32: logical shift right."""
    return a >> bits


def sar(a: Tensor, bits: int) -> Tensor:
    """SHF.R.S32: arithmetic shift right."""
    return (((a ^ 0x80000000) - 0x80000000) >> bits) & MASK


def imad(a: Tensor, b: Tensor | int, c: Tensor | int) -> Tensor:
    """IMAD: the low 32 bits of ``a * b + c``."""
    return (a * b + c) & MASK


def lop3(a: Tensor, b: Tensor | int, c: Tensor | int, table: int) -> Tensor:
    """LOP3: any bitwise function of three registers.

    ``table`` is the function of 0xF0, 0xCC and 0xAA.
    """
    result = torch.zeros_like(a)
    for row in range(8):
        if table >> row & 1:
            term = a if row & 4 else a ^ MASK
            term = term & (b if row & 2 else b ^ MASK)
            result |= term & (c if row & 1 else c ^ MASK)
    return result


def prmt(a: Tensor, b: Tensor | int, selector: int) -> Tensor:
    """PRMT: byte i of the result is byte ``selector >> 4 i & 7`` of ``b:a``, or its sign.

    Bit 3 of the selector's nibble replicates the sign.
    """
    result = torch.zeros_like(a)
    for i in range(4):
        pick = selector >> 4 * i & 0xF
        byte = (a if pick & 7 < 4 else b + torch.zeros_like(a)) >> 8 * (pick & 3) & 0xFF
        result |= ((byte >> 7) * 0xFF if pick & 8 else byte) << 8 * i
    return result


def vadd4(a: Tensor, b: Tensor) -> Tensor:
    """``__vadd4``: four byte additions, each modulo 256.

    It is computed as the compiler does since Maxwell dropped the instruction.
    """
    low = (a & 0x7F7F7F7F) + (b & 0x7F7F7F7F)
    return lop3(low, a ^ b, torch.full_like(a, 0x80808080), (0xCC & 0xAA) ^ 0xF0)


def hsub2(a: Tensor, b: int) -> Tensor:
    """HADD2 of ``-b``: two fp16 subtractions."""
    return _from_half(_half(a) - _half(torch.full_like(a, b)))


def hfma2(a: Tensor, b: int, c: int) -> Tensor:
    """HFMA2: two fp16 multiply-adds, each rounded once.

    Float32 holds the product of two fp16 and the sums that occur here exactly.
    """
    factor, addend = (_half(torch.full_like(a, v)).float() for v in (b, c))
    return _from_half((_half(a).float() * factor + addend).half())


# Conversions


def unpack_nibbles(word: Tensor) -> tuple[Tensor, Tensor]:
    """The low and the high nibbles of a word as bytes: QServe's three operations (figure 17)."""
    return word & 0x0F0F0F0F, shr(word, 4) & 0x0F0F0F0F


def lqq_dequantize(codes: Tensor, s2: Tensor, offset: Tensor) -> Tensor:
    """LiquidQuant (eq. 12): ``(Q4 * s2 + a) XOR 0x80`` in four bytes, one IMAD and one XOR.

    Args:
        codes: four u4 in bytes. s2: 0..255. offset: ``a``, one byte; replicated when the parameters
            are loaded.
    """
    return imad(codes, s2, offset * 0x01010101) ^ 0x80808080


def qoq_dequantize(codes: Tensor, s2: Tensor, szero: Tensor) -> Tensor:
    """QServe's subtraction after multiplication (figure 10b): one IMAD and one ``vadd4``.

    Args:
        codes: four u4 in bytes. s2: 0..255. szero: ``-z * s2`` modulo 256, one byte; replicated by
            one PRMT.
    """
    return vadd4(imad(codes, s2, 0), prmt(szero, 0, 0x0000))


def qoq_dequantize_xor(codes: Tensor, s2: Tensor, zero: Tensor) -> Tensor:
    """The same without ``vadd4``: one IMAD and one XOR.

    The sum has 128 - z * s2 in each byte, negative or not.

    Each byte of the sum is (q - z) * s2 + 128, which the scheme's invariant keeps within 0..255.
    """
    return imad(codes, s2, (128 - zero * s2) * 0x01010101 & MASK) ^ 0x80808080


def comet_extend(word: Tensor) -> tuple[Tensor, Tensor]:
    """COMET's zero extension (figure 7b): s4 nibbles as s8 bytes of 16 times the code.

    The low nibbles come first.
    """
    return shl(word, 4) & 0xF0F0F0F0, word & 0xF0F0F0F0


def comet_registers(word: Tensor) -> tuple[Tensor, Tensor]:
    """A w4ax-interleaved word as two mma registers: inputs 0-3 and 8-11, times 16."""
    low, high = comet_extend(word)
    return prmt(low, high, 0x5410), prmt(low, high, 0x7632)


def marlin_halves(word: Tensor) -> tuple[Tensor, Tensor]:
    """MARLIN (section 3.4): nibbles 0 and 4, then 1 and 5, as half2 bit patterns of ``code - 8``.

    ``lop3`` puts a nibble under the exponent of 1024 (0x6400): 1024 + c in the low bits, 1024 + 16
    c four bits higher. Subtracting 1032, or multiplying by 1/16 and subtracting 72, leaves c - 8
    exactly.
    """
    and_or = (0xF0 & 0xCC) | 0xAA
    low = lop3(word, 0x000F000F, 0x64006400, and_or)
    high = lop3(word, 0x00F000F0, 0x64006400, and_or)
    return hsub2(low, 0x64086408), hfma2(high, 0x2C002C00, 0xD480D480)


def marlin_registers(word: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four half2 registers of a MARLIN word, in fragment order.

    The order is (b, kh) = (0, 0), (0, 1), (1, 0), (1, 1).
    """
    return *marlin_halves(word), *marlin_halves(shr(word, 8))


def s4_operand(word: Tensor, i: int) -> Tensor:
    """Operand i (0..7) of a register as an s4 mma reads it, extended to 32 bits.

    APEX4 feeds packed registers to the tensor core; its symmetric codes need no zero point and no
    conversion.
    """
    return sar(shl(word, 28 - 4 * i), 28)


def s4_to_s8(word: Tensor) -> tuple[Tensor, Tensor]:
    """A register of eight s4 as two of four s8, even inputs then odd, for s8 tensor cores.

    A negative nibble has bit 3 set; 8 * 30 = 0xF0 fills the bits above it, without a carry.
    """
    low, high = unpack_nibbles(word)
    return imad(low & 0x08080808, 30, low), imad(high & 0x08080808, 30, high)


# --- registers and bytes
# --------------------------------------------------------------------------------------------


def from_bytes(stored: Tensor) -> Tensor:
    """A stored tensor as registers: its bytes, four a register, lowest first, flat."""
    return stored.contiguous().view(torch.uint8).view(torch.int32).flatten().long() & MASK


def to_bytes(registers: Tensor) -> Tensor:
    """The four bytes of each register, lowest first: int8 ``[..., 4]``."""
    return (
        torch.stack([registers >> 8 * i & 0xFF for i in range(4)], -1)
        .to(torch.uint8)
        .view(torch.int8)
    )


def _half(registers: Tensor) -> Tensor:
    """The two fp16 of each register: ``[..., 2]``."""
    return (
        torch.stack([registers & 0xFFFF, registers >> 16], -1).to(torch.uint16).view(torch.float16)
    )


def _from_half(halves: Tensor) -> Tensor:
    """Inverse of :func:`_half`."""
    low, high = halves.contiguous().view(torch.uint16).long().unbind(-1)
    return low | high << 16
