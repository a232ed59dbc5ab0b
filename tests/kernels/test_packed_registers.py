"""From packed words to tensor-core registers, lane by lane: the bytes on disk mean what the scheme
says.

Where a lane finds its words and which weights its registers must hold are written here from the
instructions' fragment definitions, not from the layouts.
"""

import pytest
import torch
from torch import Tensor

from qtool.layouts.apex4 import APEX4
from qtool.layouts.compute_aware import COMPUTE_AWARE
from qtool.layouts.digit_layout import DigitLayout
from qtool.layouts.dual_mma import DUAL_MMA
from qtool.layouts.marlin import MARLIN
from qtool.layouts.marlin_24 import MARLIN_24, compress
from qtool.layouts.qqq import QQQ_CHANNEL, QQQ_GROUP
from qtool.layouts.w4ax_interleaved import W4AX_INTERLEAVED
from qtool.schemes import get
from qtool.schemes.base import Params, Scheme
from tests.kernels import registers as r

N, K = 128, 256
#: a lane of a warp: l = t / 4 rows (or columns), c = t % 4 along k
LANE_ROW, LANE_COLUMN = torch.arange(32) // 4, torch.arange(32) % 4


def quantized(name: str, group_size: int | None) -> tuple[Scheme, Tensor, Params]:
    weight = torch.randn(N, K, generator=torch.Generator().manual_seed(5))
    weight[:, 7] *= 30  # an outlier a row, so that level-2 scales are not all alike
    scheme = get(name, group_size)
    params = scheme.fit(weight)
    return scheme, scheme.quantize(weight, params), params


def axes(*sizes: int) -> list[Tensor]:
    """One index tensor an axis, ready to broadcast."""
    return list(torch.meshgrid(*map(torch.arange, sizes), indexing="ij"))


@pytest.mark.parametrize("scheme_name", ["w4a8-lqq", "w4a8-qoq-g128"])
@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_dual_mma(scheme_name: str, group_size: int) -> None:
    """A of wgmma m64nNk32: warp w, lane t has rows 16 w + t/4 (+8), bytes 4 (t%4) (+16)."""
    scheme, codes, params = quantized(scheme_name, group_size)
    words = r.from_bytes(DUAL_MMA.pack(codes)["qweight"]).view(N // 64, K // 64, 128, 4)
    nt, kt, thread, register = axes(*words.shape)
    warp, lane = thread // 32, thread % 32
    level2 = scheme.level2(codes, params)
    for step, nibbles in enumerate(r.unpack_nibbles(words)):
        # parameters in the threads' order: rows q and q + 8 of a thread side by side
        place = (
            nt,
            (64 * kt + 32 * step) // group_size,
            16 * warp + 2 * (lane // 4) + register % 2,
        )
        s2 = DUAL_MMA.pack_group(params["s2"])[place].long()
        if scheme_name == "w4a8-lqq":
            result = r.lqq_dequantize(
                nibbles, s2, DUAL_MMA.pack_group(params["offset"])[place].long()
            )
        else:
            result = r.qoq_dequantize(
                nibbles, s2, -DUAL_MMA.pack_group(params["zero"])[place].long() * s2 & 0xFF
            )
        row = 64 * nt + 16 * warp + lane // 4 + 8 * (register % 2)
        column = 64 * kt + 32 * step + 4 * (lane % 4) + 16 * (register // 2)
        assert torch.equal(
            r.to_bytes(result), level2[row[..., None], column[..., None] + torch.arange(4)]
        )


def test_compute_aware() -> None:
    """mma.m16n8k32: lane t: rows t/4 (+8), bytes 4 (t%4) (+16); one 32-bit load brings four rows'
    parameters.
    """
    scheme, codes, params = quantized("w4a8-qoq-g128", 128)
    words = r.from_bytes(COMPUTE_AWARE.pack(codes)["qweight"]).view(N // 32, K // 32, 32, 4)
    nt, kt, lane, word = axes(*words.shape)
    szero = -(params["zero"].long() * params["s2"].long()) & 0xFF
    stored = [COMPUTE_AWARE.pack_group(p.to(torch.uint8)) for p in (params["s2"], szero)]
    four_rows = [r.from_bytes(p).view(K // 128, N // 32, 8)[kt // 4, nt, lane // 4] for p in stored]
    level2 = scheme.level2(codes, params)
    for hi, nibbles in enumerate(r.unpack_nibbles(words)):
        h, kh = word % 2, word // 2
        s2, zero = (p >> 8 * (2 * hi + h) & 0xFF for p in four_rows)
        row = 32 * nt + 16 * hi + 8 * h + lane // 4
        column = 32 * kt + 16 * kh + 4 * (lane % 4)
        expected = level2[row[..., None], column[..., None] + torch.arange(4)]
        assert torch.equal(r.to_bytes(r.qoq_dequantize(nibbles, s2, zero)), expected)


def test_w4ax_interleaved_as_s8() -> None:
    """Figure 6: thread 0 of each 16 inputs takes 0-3 and 8-11, thread 1 takes 4-7 and 12-15; bytes
    worth 16 codes.
    """
    _, codes, _ = quantized("w4ax-fmpq", 128)
    words = r.from_bytes(W4AX_INTERLEAVED.pack(codes)["qweight"]).view(N, K // 16, 2)
    row, sixteen, thread = axes(*words.shape)
    for j, register in enumerate(r.comet_registers(words)):
        column = (16 * sixteen + 4 * thread + 8 * j)[..., None] + torch.arange(4)
        assert torch.equal(r.to_bytes(register).long(), 16 * codes[row[..., None], column].long())


def test_w4ax_interleaved_meets_s4_activations_packed_alike() -> None:
    _, codes, _ = quantized("w4ax-fmpq", 128)
    tokens = torch.randint(-8, 8, (16, K), generator=torch.Generator().manual_seed(6)).to(
        torch.int8
    )
    weight, x = (
        r.from_bytes(W4AX_INTERLEAVED.pack(c)["qweight"]).view(len(c), -1) for c in (codes, tokens)
    )
    sums = torch.zeros(len(tokens), N, dtype=torch.long)
    for i in range(8):  # an s4 mma multiplies operand i of both registers
        a, b = ((r.s4_operand(t, i) ^ 0x80000000) - 0x80000000 for t in (x, weight))
        sums += a @ b.t()
    assert torch.equal(sums, tokens.long() @ codes.long().t())


@pytest.mark.parametrize("group_size", [32, 128, None])
def test_apex4(group_size: int | None) -> None:
    """ldmatrix of 8 vectors: lane t gets word t%4 of vector t/4; mma.m16n8k64 s4: inputs 8 (t%4) +
    i (+32).
    """
    _, codes, _ = quantized("w4a4", group_size)
    vectors = r.from_bytes(APEX4.pack(codes)["qweight"]).view(K // 32, N, 4)
    for k64 in range(K // 64):
        for register in range(2):
            fragment = vectors[2 * k64 + register].view(N // 8, 8, 4)[
                :, LANE_ROW, LANE_COLUMN
            ]  # [N/8, 32]
            row = 8 * torch.arange(N // 8)[:, None] + LANE_ROW
            column = 64 * k64 + 32 * register + 8 * LANE_COLUMN
            for i in range(8):
                assert torch.equal(
                    r.s4_operand(fragment, i), codes[row, column + i].long() & 0xFFFFFFFF
                )
            for odd, result in enumerate(r.s4_to_s8(fragment)):
                expected = codes[row[..., None], (column + odd)[:, None] + 2 * torch.arange(4)]
                assert torch.equal(r.to_bytes(result), expected)


@pytest.mark.parametrize("group_size", [128, None])
def test_marlin(group_size: int | None) -> None:
    """mma.m16n8k16 fp16, B: lane t: output t/4, inputs 2 (t%4) + {0, 1} (+8); word j is block j of
    16 outputs.
    """
    scheme, codes, params = quantized("w4a16", group_size)
    words = r.from_bytes(MARLIN.pack(codes)["qweight"]).view(K // 16, N // 64, 32, 4)
    kt, nt, lane, j = axes(*words.shape)
    units = scheme.dequantize(codes, {"scale": torch.ones_like(params["scale"])})
    for index, register in enumerate(r.marlin_registers(words)):
        b, kh = divmod(index, 2)
        row = 64 * nt + 16 * j + 8 * b + lane // 4
        for half in range(2):
            column = 16 * kt + 8 * kh + 2 * (lane % 4) + half
            pattern = units[row, column].to(torch.float16).view(torch.int16).long() & 0xFFFF
            assert torch.equal(register >> 16 * half & 0xFFFF, pattern)


def test_marlin_24_values() -> None:
    """mma.sp m16n8k32 fp16, A: lane t: rows t/4 (+8), kept inputs 2 (t%4) + {0, 1} (+8).

    Row i of the instruction of word j is output 8 i + j, row i + 8 output 8 i + 4 + j, so that a
    lane's results of the four words are eight consecutive outputs.
    """
    _, codes, _ = quantized("w4a16-24", 128)
    kept, _ = compress(codes, 8)
    words = r.from_bytes(MARLIN_24.pack(codes)["qweight"]).view(K // 32, N // 64, 32, 4)
    kt, nt, lane, j = axes(*words.shape)
    for index, register in enumerate(r.marlin_registers(words)):
        b, kh = divmod(index, 2)
        row = 64 * nt + 8 * (lane // 4) + 4 * b + j
        for half in range(2):
            value = kept[row, 16 * kt + 8 * kh + 2 * (lane % 4) + half].to(torch.float16) - 8
            assert torch.equal(
                register >> 16 * half & 0xFFFF, value.view(torch.int16).long() & 0xFFFF
            )


@pytest.mark.parametrize("layout", [QQQ_CHANNEL, QQQ_GROUP], ids=lambda layout: layout.name)
def test_qqq(layout: DigitLayout) -> None:
    """mma.m16n8k16 s8, B: lane t: output t/4, inputs 4 (t%4) .. +3; word j holds outputs 16 j + t/4
    and + 8.
    """
    signed = layout is QQQ_CHANNEL
    codes = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(7)).to(torch.uint8)
    if signed:
        codes = codes.view(torch.int8) - 8
    words = r.from_bytes(layout.pack(codes)["qweight"]).view(K // 16, N // 64, 32, 4)
    kt, nt, lane, j = axes(*words.shape)
    row, column = 64 * nt + 16 * j + lane // 4, 16 * kt + 4 * (lane % 4)
    if signed:  # w & 0xF0F0F0F0 is output c, w << 4 is output c + 8, both 16 times the code
        for b, register in enumerate(reversed(r.comet_extend(words))):
            expected = (
                16 * codes[(row + 8 * b)[..., None], column[..., None] + torch.arange(4)].long()
            )
            assert torch.equal(r.to_bytes(register).long(), expected)
    else:  # through fp16: each half2 holds two of the four inputs of an output
        for index, register in enumerate(r.marlin_registers(words)):
            b, k1 = divmod(index, 2)
            for half in range(2):
                value = codes[row + 8 * b, column + 2 * k1 + half].to(torch.float16) - 8
                assert torch.equal(
                    register >> 16 * half & 0xFFFF, value.view(torch.int16).long() & 0xFFFF
                )
