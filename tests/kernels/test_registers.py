"""The in-register conversions over every legal input, four lanes at once beside different
neighbours.
"""

from itertools import product

import pytest
import torch
from torch import Tensor

from qtool.schemes.lqq import LiquidQuant
from qtool.schemes.qoq_group import ProgressiveQoQ
from tests.kernels import registers as r

K = 128


def bytes_of(values: Tensor) -> Tensor:
    """Registers of a byte matrix ``[N, K]``: ``[N, K / 4]``."""
    return r.from_bytes(values).view(len(values), -1)


def crowded_codes(low: Tensor, high: Tensor) -> Tensor:
    """Rows ``[N, 128]`` of codes within ``low .. high [N]``: each code in each lane, beside lowest
    and highest ones.

    A word holds one code and three extremes, so that any carry out of a lane would change its
    neighbour.
    """
    # each code beside lowest, then beside highest neighbours
    codes = torch.arange(16).repeat_interleave(2)
    lanes = torch.arange(32) % 4
    rows = []
    for lane_shift in range(4):  # four variants of the rows: the code walks through the lanes
        words = torch.where(torch.arange(32)[:, None] % 2 == 0, 0, 15).repeat(1, 4)
        words[torch.arange(32), (lanes + lane_shift) % 4] = codes
        rows.append(words.flatten())
    spread = torch.stack(rows)[:, None]  # [4, 1, 128]
    return (
        torch.maximum(torch.minimum(spread, high[:, None]), low[:, None])
        .to(torch.uint8)
        .flatten(0, 1)
    )


def test_lqq_equals_the_scheme_over_every_code_scale_and_offset() -> None:
    pairs = torch.tensor(list(product(range(1, 17), range(9, 248))))
    s2, offset = pairs.unbind(1)
    highest = torch.div(255 - offset, s2, rounding_mode="floor").clamp_max(15)
    codes = crowded_codes(torch.zeros_like(highest), highest)
    s2, offset = s2.repeat(4)[:, None], offset.repeat(4)[:, None]
    got = r.to_bytes(r.lqq_dequantize(bytes_of(codes), s2, offset)).flatten(1)

    scheme = LiquidQuant(group_size=K)
    params = {
        "s1": torch.ones(len(codes)),
        "s2": s2.to(torch.uint8),
        "offset": offset.to(torch.uint8),
    }
    scheme.check(codes, params)
    assert torch.equal(got, scheme.level2(codes, params))
    assert torch.equal(got.long(), codes.long() * s2 + offset - 128)
    # every legal triple was there
    seen = (codes.long() + 16 * (s2 + 32 * offset)).unique()
    assert len(seen) == int((highest + 1).sum())


def test_qoq_equals_the_scheme_over_every_code_scale_and_zero() -> None:
    s2, zero = torch.tensor(list(product(range(1, 17), range(16)))).unbind(1)
    scheme = ProgressiveQoQ(group_size=K)
    grid = scheme.grid({"s1": torch.ones(256), "s2": s2[:, None], "zero": zero[:, None]})
    codes = crowded_codes(grid.low[:, 0].long(), grid.high[:, 0].long())
    s2, zero = s2.repeat(4)[:, None], zero.repeat(4)[:, None]
    got = r.to_bytes(r.qoq_dequantize(bytes_of(codes), s2, -zero * s2 & 0xFF)).flatten(1)
    assert torch.equal(got, r.to_bytes(r.qoq_dequantize_xor(bytes_of(codes), s2, zero)).flatten(1))

    params = {"s1": torch.ones(len(codes)), "s2": s2.to(torch.uint8), "zero": zero.to(torch.uint8)}
    scheme.check(codes, params)
    assert torch.equal(got, scheme.level2(codes, params))
    assert torch.equal(got.long(), (codes.long() - zero) * s2)


def test_subtraction_before_multiplication_would_carry() -> None:
    """Why QServe multiplies first: (Q4 - z) * s2 in one 32-bit multiplication spoils the lane
    above.
    """
    codes, zero, s2 = torch.tensor([[3, 9, 9, 9]], dtype=torch.uint8), 8, 2
    before = r.imad(r.vadd4(bytes_of(codes), torch.tensor(0x01010101 * (-zero & 0xFF))), s2, 0)
    assert r.to_bytes(before).flatten().tolist() != [-10, 2, 2, 2]


#: every byte in every lane, beside three random ones: both nibbles run through all s4
ALL_WORDS = torch.cat(
    [
        (torch.arange(256) << 8 * lane)
        | (
            torch.randint(2**32, (256,), generator=torch.Generator().manual_seed(lane))
            & ~(0xFF << 8 * lane)
        )
        for lane in range(4)
    ]
)


def s4(word: Tensor, i: int) -> Tensor:
    """Nibble i as a two's complement number, by comparison."""
    nibble = word >> 4 * i & 0xF
    return torch.where(nibble < 8, nibble, nibble - 16)


def test_three_operations_unpack_eight_nibbles() -> None:
    low, high = r.unpack_nibbles(ALL_WORDS)
    for byte in range(4):
        assert torch.equal(r.to_bytes(low)[:, byte].long(), ALL_WORDS >> 8 * byte & 0xF)
        assert torch.equal(r.to_bytes(high)[:, byte].long(), ALL_WORDS >> 8 * byte + 4 & 0xF)


def test_comet_extends_every_s4_to_sixteen_times_its_value() -> None:
    low, high = r.comet_extend(ALL_WORDS)
    for byte in range(4):
        assert torch.equal(r.to_bytes(low)[:, byte].long(), 16 * s4(ALL_WORDS, 2 * byte))
        assert torch.equal(r.to_bytes(high)[:, byte].long(), 16 * s4(ALL_WORDS, 2 * byte + 1))


def test_apex4_signs() -> None:
    even, odd = r.s4_to_s8(ALL_WORDS)
    for byte in range(4):
        assert torch.equal(r.to_bytes(even)[:, byte].long(), s4(ALL_WORDS, 2 * byte))
        assert torch.equal(r.to_bytes(odd)[:, byte].long(), s4(ALL_WORDS, 2 * byte + 1))
    for i in range(8):
        assert torch.equal(r.s4_operand(ALL_WORDS, i), s4(ALL_WORDS, i) & 0xFFFFFFFF)


def test_marlin_yields_the_bit_patterns_of_fp16() -> None:
    patterns = (torch.arange(16) - 8).to(torch.float16).view(torch.int16).long() & 0xFFFF
    order = [(0, 4), (1, 5), (2, 6), (3, 7)]  # the nibbles of each half2 register, low half first
    for register, nibbles in zip(r.marlin_registers(ALL_WORDS), order, strict=True):
        for half, nibble in enumerate(nibbles):
            expected = patterns[ALL_WORDS >> 4 * nibble & 0xF]
            assert torch.equal(register >> 16 * half & 0xFFFF, expected)


A, B, C = (
    torch.randint(2**32, (500,), generator=torch.Generator().manual_seed(i)) for i in range(3)
)


def test_lop3_is_its_table() -> None:
    assert torch.equal(r.lop3(A, B, C, (0xF0 & 0xCC) | 0xAA), (A & B) | C)
    assert torch.equal(r.lop3(A, B, C, 0xF0 ^ 0xCC ^ 0xAA), A ^ B ^ C)
    for table in range(256):
        got = r.lop3(A, B, C, table)
        for bit in (0, 13, 31):
            row = (A >> bit & 1) << 2 | (B >> bit & 1) << 1 | (C >> bit & 1)
            assert torch.equal(got >> bit & 1, torch.tensor(table) >> row & 1)


@pytest.mark.parametrize("selector", [0x3210, 0x5410, 0x7632, 0x0000, 0xFB98])
def test_prmt_picks_bytes_and_signs(selector: int) -> None:
    for a, b, got in zip(A.tolist(), B.tolist(), r.prmt(A, B, selector).tolist(), strict=True):
        source = a.to_bytes(4, "little") + b.to_bytes(4, "little")
        picks = [selector >> 4 * i & 0xF for i in range(4)]
        expected = [(0xFF if source[p & 7] >> 7 else 0) if p & 8 else source[p & 7] for p in picks]
        assert list(got.to_bytes(4, "little")) == expected


def test_vadd4_never_carries() -> None:
    expected = (r.to_bytes(A).long() + r.to_bytes(B).long()) & 0xFF
    assert torch.equal(r.to_bytes(r.vadd4(A, B)).long() & 0xFF, expected)


def test_shifts_and_imad_are_32_bits_wide() -> None:
    assert torch.equal(
        r.sar(A, 5), torch.tensor([(a - (a >> 31 << 32) >> 5) % 2**32 for a in A.tolist()])
    )
    assert torch.equal(r.shl(A, 9), torch.tensor([a * 512 % 2**32 for a in A.tolist()]))
    assert torch.equal(r.shr(A, 9), torch.tensor([a // 512 for a in A.tolist()]))
    wide = [(a * b + c) % 2**32 for a, b, c in zip(A.tolist(), B.tolist(), C.tolist(), strict=True)]
    assert torch.equal(r.imad(A, B, C), torch.tensor(wide))
