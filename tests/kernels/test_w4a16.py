"""The W4A16 ops on a CPU, and where the kernels expect each code, position and scale."""

import itertools

import pytest
import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.format import LinearFormat
from qtool.kernels.mma.half_gemm import Variant, shared_bytes
from qtool.kernels.mma.half_tiles import TABLE, choose
from qtool.kernels.mma.w4a16 import by_wgmma, w4a16_24_gemm, w4a16_gemm
from qtool.layouts.marlin import MARLIN
from qtool.layouts.marlin_24 import MARLIN_24, compress
from qtool.schemes.w4a16_24 import keep_largest
from tests.kernels.registers import from_bytes, prmt

N, K = 256, 384
#: MARLIN's lanes are written c = lane // 4, q = lane % 4, as in csrc/mma/weights_marlin.cuh
LANES = [(lane, lane // 4, lane % 4) for lane in range(32)]


@pytest.fixture(
    params=[(s, g) for s in ("w4a16", "w4a16-24") for g in (32, 64, 128, None)], ids=str
)
def case(request: pytest.FixtureRequest) -> tuple[LinearFormat, dict[str, Tensor], Tensor, Tensor]:
    """Format, stored tensors, tokens, and the scheme's own product."""
    scheme, group = request.param
    linear_format = LinearFormat(
        scheme, group, "marlin" if scheme == "w4a16" else "marlin-24", "bfloat16"
    )
    s = linear_format.scheme_object
    weight, x = torch.randn(N, K), torch.randn(5, K).bfloat16()
    params = s.fit(weight)
    codes = s.quantize(weight, params)
    return linear_format, linear_format.pack(codes, params), x, s.matmul(x, codes, params)


def multiply(
    stored: dict[str, Tensor], x: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor:
    if "metadata" in stored:
        return w4a16_24_gemm(
            x, stored["qweight"], stored["metadata"], stored["scale"], bias, out_dtype
        )
    return w4a16_gemm(x, stored["qweight"], stored["scale"], bias, out_dtype)


def test_is_the_schemes_matmul(
    case: tuple[LinearFormat, dict[str, Tensor], Tensor, Tensor],
) -> None:
    _, stored, x, want = case
    assert torch.equal(multiply(stored, x, None, torch.float32), want)
    bias = torch.randn(N).half()
    assert torch.equal(multiply(stored, x, bias, torch.bfloat16), (want + bias.float()).bfloat16())


@pytest.mark.parametrize("sparse", [False, True])
def test_opcheck(sparse: bool) -> None:
    x, scale, bias = torch.randn(3, 256).half(), torch.rand(2, 128), torch.randn(128)
    codes = torch.randint(0, 16, (128, 256), dtype=torch.uint8)
    if sparse:
        stored = MARLIN_24.pack(torch.where(keep_largest(torch.rand(128, 256)), codes, 8))
        torch.library.opcheck(
            w4a16_24_gemm, (x, stored["qweight"], stored["metadata"], scale, bias, torch.float16)
        )
    else:
        torch.library.opcheck(
            w4a16_gemm, (x, MARLIN.pack(codes)["qweight"], scale, bias, torch.float16)
        )


def registers(words: Tensor) -> dict[int, list[Tensor]]:
    """The two codes of each fragment register, as ``dequantize`` in csrc/common/half_codes.cuh
    takes them from a word.
    """
    wide = words.long() & 0xFFFFFFFF
    nibbles = [[wide >> (16 * half + 4 * i) & 15 for half in range(2)] for i in range(4)]
    return dict(zip((0, 2, 1, 3), nibbles, strict=True))


def test_a_marlin_word_is_the_fragment_the_kernel_multiplies() -> None:
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    words = MARLIN.pack(codes)["qweight"].view(K // 16, N // 64, 32, 4)
    found = torch.full((K // 16, N // 64, 64, 16), 99)  # [k tile, n tile, output, input]
    for lane, c, q in LANES:
        for j in range(4):
            for r, pair in registers(words[:, :, lane, j]).items():
                for k0 in range(2):
                    found[:, :, 16 * j + c + 8 * (r % 2), 2 * q + k0 + 8 * (r // 2)] = pair[k0]
    assert torch.equal(found.permute(1, 2, 0, 3).reshape(N, K).to(torch.uint8), codes)


def test_a_warpgroups_words_are_the_fragments_wgmma_multiplies() -> None:
    """As ``Marlin`` of csrc/hopper/fragments_marlin.cuh loads them: A of wgmma m64nNk16 is, for
    thread t, rows 16 (t / 32) + t % 32 / 4 and + 8, inputs 2 (t % 4), the next, and both + 8.
    """
    codes = torch.randint(0, 16, (N, K), dtype=torch.uint8)
    scale = torch.rand(N, K // 128)
    stored = MARLIN.pack(codes)["qweight"].contiguous().view(torch.uint8)  # [K / 16, 8 N]
    scales = MARLIN.pack_group(scale).flatten()  # [G, N]
    found = torch.full((N, K), 99)
    found_scale = torch.zeros(N, K // 128)
    for row in range(0, N, 64):
        stage = stored[:, 8 * row :][:, :512].contiguous()  # a box: 16 inputs a line
        for t in range(128):
            at = t % 32 * 16 + t // 32 * 4
            words = stage[:, at : at + 4].contiguous().view(torch.int32).flatten()
            q = row + t // 32 * 16 + t % 32 // 4
            for r, pair in registers(words).items():
                for k0 in range(2):
                    column = 2 * (t % 4) + k0 + 8 * (r // 2)
                    found[q + 8 * (r % 2), column::16] = pair[k0]
            for group, h in itertools.product(range(K // 128), range(2)):
                place = group * N + row + t % 32 // 4 * 8 + t // 32 * 2 + h
                found_scale[q + 8 * h, group] = scales[place]
    assert torch.equal(found.to(torch.uint8), codes)
    assert torch.equal(found_scale, scale)


def test_a_warpgroups_words_are_the_sparse_fragments_wgmma_multiplies() -> None:
    """As ``Marlin24`` of csrc/hopper/fragments_marlin.cuh loads them. A of wgmma.sp m64nNk32 is the
    kept half of 32 inputs in the places of a dense 64 x 16. Of four threads, 2 s and 2 s + 1 hold
    the positions for selector s, each those of 16 inputs: a nibble a quad, of its first row in the
    low half of the register, of the second in the high one (PTX ISA, sparse matrix storage).
    """
    codes = torch.where(keep_largest(torch.rand(N, K)), torch.randint(0, 16, (N, K)), 8)
    scale = torch.rand(N, K // 128)
    packed = MARLIN_24.pack(codes.to(torch.uint8))
    scales = MARLIN_24.pack_group(scale).flatten()  # [G, N]
    values, positions = torch.full((N, K // 2), 99), torch.full((N, K // 4), 99)
    found_scale = torch.zeros(N, K // 128)
    for row in range(0, N, 64):
        # boxes: a line is what the layout has of 32 inputs
        lines = packed["qweight"].view(torch.uint8)[:, 8 * row :][:, :512].contiguous()
        held = packed["metadata"].view(torch.uint8)[:, 4 * row :][:, :256].contiguous()
        for t in range(128):
            c, q, warp = t % 32 // 4, t % 4, t // 32
            at = warp * 128 + q * 16 + c % 4 * 4
            first, second = word_at(lines, at), word_at(lines, at + 64)
            mine = row + 16 * warp + c
            for r, pair in registers(prmt(first, second, 0x7351 if c // 4 else 0x6240)).items():
                for k0 in range(2):
                    values[mine + 8 * (r % 2), 2 * q + k0 + 8 * (r // 2) :: 16] = pair[k0]

            at = c // 2 % 2 * 128 + warp * 32 + c % 2 * 8 + q % 2 * 4
            pairs = held[q // 2 :: 2]  # the instruction of two that this thread holds them for
            both = prmt(word_at(pairs, at), word_at(pairs, at + 16), 0x7632 if c // 4 else 0x5410)
            for b, quad in itertools.product(range(2), range(4)):
                column = 8 * (q // 2) + 4 * (q % 2) + quad
                positions[mine + 8 * b, column::16] = both >> (16 * b + 4 * quad) & 15

            for group, b in itertools.product(range(K // 128), range(2)):
                place = group * N + row + warp * 16 + c % 4 * 2 + c // 4 + 8 * b
                found_scale[mine + 8 * b, group] = scales[place]
    want_values, want_positions = compress(codes.to(torch.uint8), 8)
    assert torch.equal(values.to(torch.uint8), want_values)
    assert torch.equal(positions.to(torch.uint8), want_positions)
    assert torch.equal(found_scale, scale)


def word_at(lines: Tensor, byte: int) -> Tensor:
    """The 32-bit word at ``byte`` of each line."""
    return from_bytes(lines[:, byte : byte + 4])


def test_hoppers_kernels_by_tokens() -> None:
    """mma.sync up to 16 tokens, then wgmma; other GPUs have mma.sync."""
    chosen = [by_wgmma(m, (9, 0)) for m in (1, 16, 17, 4096)]
    assert chosen == [False, False, True, True]
    assert not by_wgmma(4096, (8, 0))


def test_marlin_24_words_are_the_sparse_fragments_the_kernel_multiplies() -> None:
    codes = torch.where(keep_largest(torch.rand(N, K)), torch.randint(0, 16, (N, K)), 8).to(
        torch.uint8
    )
    packed = MARLIN_24.pack(codes)
    words = packed["qweight"].view(K // 32, N // 64, 32, 4)
    held = packed["metadata"].view(torch.int32).view(K // 32, N // 64, 2, 32).long() & 0xFFFFFFFF
    values = torch.full((K // 32, N // 64, 64, 16), 99)  # kept codes of 32 inputs
    positions = torch.full((K // 32, N // 64, 64, 8), 99)  # their quads
    for lane, c, q in LANES:
        for j in range(4):
            for r, pair in registers(words[:, :, lane, j]).items():
                for k0 in range(2):
                    values[:, :, 8 * c + j + 4 * (r % 2), 2 * q + k0 + 8 * (r // 2)] = pair[k0]
            if (
                q // 2 == j % 2
                # the selector of fragment j: these lanes hold its rows c and c + 8, quads 4 (q % 2)
                # ..
            ):
                for half, quad in ((h, i) for h in range(2) for i in range(4)):
                    nibble = held[:, :, j // 2, lane] >> (16 * half + 4 * quad) & 15
                    positions[:, :, 8 * c + j + 4 * half, 4 * (q % 2) + quad] = nibble
    want_values, want_positions = compress(codes, 8)
    assert torch.equal(values.permute(1, 2, 0, 3).reshape(N, K // 2).to(torch.uint8), want_values)
    assert torch.equal(
        positions.permute(1, 2, 0, 3).reshape(N, K // 4).to(torch.uint8), want_positions
    )


@pytest.mark.parametrize("layout", [MARLIN, MARLIN_24], ids=lambda layout: layout.name)
def test_a_lane_finds_its_eight_scales_together(layout: object) -> None:
    outputs = torch.arange(N).float()[:, None].expand(N, 3)
    stored = layout.pack_group(outputs.contiguous())  # type: ignore[attr-defined]
    tile = stored[1].view(N // 64, 8, 4, 2)  # lane c's are [c, j, b]
    c, j, b = torch.meshgrid(torch.arange(8), torch.arange(4), torch.arange(2), indexing="ij")
    output = 16 * j + 8 * b + c if layout is MARLIN else 8 * c + 4 * b + j
    assert torch.equal(tile, torch.arange(0, N, 64)[:, None, None, None] + output.float())


def test_the_kernels_order_of_channel_scales_is_marlins() -> None:
    n = torch.arange(N)
    # Marlin::channel
    place = n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 16 * 4 + n % 16 // 8 * 2 + n % 2
    assert torch.equal(MARLIN.pack_channel(n)[place], n)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 3), (12, 1)])
def test_every_chosen_tile_is_compiled_and_has_two_stages(capability: tuple[int, int]) -> None:
    same = {(8, 6): (8, 9), (10, 3): (10, 0), (12, 1): (12, 0)}
    known = TABLE[same.get(capability, capability)]
    for m, n in itertools.product(
        (1, 8, 9, 16, 17, 32, 33, 64, 100, 4096), (64, 4096, 6144, 57344)
    ):
        tile = choose(m, n, capability)
        assert tile in known
        for sparse, scale in itertools.product((False, True), (torch.float32, torch.bfloat16)):
            variant = Variant(sparse, 32, torch.bfloat16, scale, torch.float32)
            assert tile.stages(variant.stage_bytes(tile), shared_bytes(tile, capability)) >= 2


def test_refuses_in_one_sentence() -> None:
    x = torch.zeros(2, 256).half()
    qweight, scale = torch.zeros(16, 256, dtype=torch.int32), torch.ones(2, 128)
    with pytest.raises(QtoolError, match=r"out_dtype is torch\.int32"):
        w4a16_gemm(x, qweight, scale, None, torch.int32)
    with pytest.raises(QtoolError, match=r"x is torch\.float32"):
        w4a16_gemm(x.float(), qweight, scale, None, torch.float16)
    with pytest.raises(QtoolError, match=r"x has shape \(2, 128\)"):
        w4a16_gemm(x[:, :128], qweight, scale, None, torch.float16)
    with pytest.raises(QtoolError, match="N must be a multiple of 64 and K of 128"):
        w4a16_gemm(x, qweight[:, :64], scale, None, torch.float16)
    with pytest.raises(
        QtoolError, match="the weight is 128 x 192; N must be a multiple of 64 and K of 128"
    ):
        w4a16_gemm(x[:, :192].contiguous(), qweight[:12], scale, None, torch.float16)
    with pytest.raises(QtoolError, match="scale has 3 rows for K = 256"):
        w4a16_gemm(x, qweight, torch.ones(3, 128), None, torch.float16)
    with pytest.raises(QtoolError, match="scale has strides"):
        w4a16_gemm(x, qweight, torch.ones(128, 2).t(), None, torch.float16)
    with pytest.raises(QtoolError, match=r"metadata has shape \(8, 128\)"):
        w4a16_24_gemm(
            x, qweight[:8], torch.zeros(8, 128, dtype=torch.int16), scale, None, torch.float16
        )
