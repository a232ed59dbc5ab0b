"""The W4A4 and W4Ax op on a CPU, and the way of its weights to wgmma's registers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool import layouts, schemes
from qtool.errors import QtoolError
from qtool.kernels.activation.arrangement import ARRANGEMENTS, arrange, arrangement, disarrange
from qtool.kernels.activation.quantize_activation_groups import (
    GROUP_SIZES,
    quantize_activation_groups,
)
from qtool.kernels.hopper.w4ax import LAYOUTS, w4ax_gemm
from qtool.kernels.mma.w4ax import w4ax_mma_gemm
from qtool.schemes.fmpq import Fmpq
from tests.kernels import registers as r

CASES = [("apex4", 128), ("apex4", 32), ("apex4", 512), ("apex4", None), ("w4ax-interleaved", 128)]


def arguments(
    layout: str,
    group: int | None,
    m: int = 5,
    n: int = 128,
    k: int = 1024,
    bias: Tensor | None = None,
) -> tuple[dict[str, Any], Tensor]:
    """The op's arguments for a random weight and input, and the scheme's own product."""
    generator = torch.Generator().manual_seed(3)
    weight, x = torch.randn(n, k, generator=generator), torch.randn(m, k, generator=generator)
    scheme, blocks = schemes.get("w4a4", group), None
    if layout == "w4ax-interleaved":
        blocks = (torch.arange(k // 128) % 2).to(torch.uint8)
        scheme = Fmpq(128).with_blocks(blocks)
    params = scheme.fit(weight)
    codes, where = scheme.quantize(weight, params), layouts.get(layout)
    qx, sx = quantize_activation_groups(x, None, None, blocks, "none", 0.0, group, layout)
    given = {
        "x": qx,
        "sx": sx,
        "qweight": where.pack(codes)["qweight"],
        "scale": where.pack_group(params["scale"]),
        "bias": bias,
        "layout": layout,
        "group_size": group,
        "out_dtype": torch.float32,
    }
    return given, scheme.matmul(x, codes, params, bias)


@pytest.mark.parametrize(("layout", "group"), CASES)
def test_is_the_schemes_matmul_and_passes_opcheck(layout: str, group: int | None) -> None:
    for bias in (torch.randn(128), None):
        given, want = arguments(layout, group, bias=bias)
        assert torch.equal(w4ax_gemm(**given), want)
    torch.library.opcheck(w4ax_gemm, tuple(given.values()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bare_sums(layout: str) -> None:
    given, _ = arguments(layout, 128)
    codes = layouts.get(layout).unpack({"qweight": given["qweight"]}, 128, 1024, signed=True)
    sums = w4ax_gemm(**given | {"out_dtype": torch.int32})
    assert torch.equal(sums.long(), disarrange(given["x"], layout).long() @ codes.long().t())


@pytest.mark.parametrize("layout", ARRANGEMENTS)
def test_an_arrangement_is_a_permutation_of_32(layout: str) -> None:
    assert sorted(arrangement(layout)) == list(range(32))
    codes = torch.randint(-8, 8, (3, 96))
    assert torch.equal(disarrange(arrange(codes, layout), layout), codes)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_words_meet_the_tokens_in_wgmmas_registers(layout: str) -> None:
    """A of wgmma m64nNk32: warp w, lane t has rows 16 w + t/4 (+8), bytes 4 (t%4) (+16)."""
    n, k = 64, 128
    codes = torch.randint(-8, 8, (n, k), dtype=torch.int8)
    tokens = torch.randint(-127, 128, (9, k), dtype=torch.int8)
    words = r.from_bytes(layouts.get(layout).pack(codes)["qweight"])
    # the word of lane t: 32 inputs of a row are four words, lane c of a quad takes word c
    words = (
        words.view(k // 32, n, 4)
        if layout == "apex4"
        else words.view(n, k // 32, 4).transpose(0, 1)
    )
    operand = torch.zeros(k // 32, n, 32, dtype=torch.long)  # [instruction, row, byte]
    for lane in range(128):
        warp, q, c = lane // 32, lane % 32 // 4, lane % 4
        for h in range(2):
            row = 16 * warp + q + 8 * h
            low, high = r.comet_extend(words[:, row, c])
            operand[:, row, 4 * c : 4 * c + 4] = r.to_bytes(low).long()
            operand[:, row, 16 + 4 * c : 16 + 4 * c + 4] = r.to_bytes(high).long()
    sums = torch.einsum(
        "smb,snb->mn", arrange(tokens, layout).long().view(9, -1, 32).transpose(0, 1), operand
    )
    assert torch.equal(sums, 16 * (tokens.long() @ codes.long().t()))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layout", "apex", "did you mean apex4"),
        ("group_size", 48, "no group size 48"),
        ("x", torch.zeros(5, 1000, dtype=torch.int8), "K = 1000 must be multiples of 64"),
        ("x", torch.zeros(5, 1024), "x is torch.float32; expected torch.int8"),
        ("sx", torch.zeros(8, 5), r"sx has shape \(8, 5\); expected \(8, 8\)"),
        ("scale", torch.zeros(4, 128), r"scale has shape \(4, 128\)"),
        ("qweight", torch.zeros(128, 512, dtype=torch.uint8), "qweight has shape"),
        ("out_dtype", torch.float64, "out_dtype is torch.float64"),
        ("bias", torch.zeros(128, device="meta"), "must be on one device"),
    ],
)
def test_refuses_in_one_sentence(name: str, value: object, message: str) -> None:
    given, _ = arguments("apex4", 128)
    with pytest.raises(QtoolError, match=message) as error:
        w4ax_gemm(**given | {name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("op", "code"), [(w4ax_gemm, torch.int8), (w4ax_mma_gemm, torch.uint8)])
def test_refuses_a_weight_without_inputs(op: Callable[..., Tensor], code: torch.dtype) -> None:
    x, sx, qweight = torch.zeros(5, 0, dtype=code), torch.zeros(0, 8), torch.zeros(0, 64, 16)
    more = {"eight_bit": None} if op is w4ax_mma_gemm else {}
    weight = {"qweight": qweight.byte(), "scale": torch.zeros(0, 64), "bias": None}
    how = {"layout": "apex4", "group_size": None, "out_dtype": torch.float32}
    with pytest.raises(QtoolError, match=r"K = 0 .* above 0 and at most 65536"):
        op(x=x, sx=sx, **weight, **more, **how)


def test_has_every_group_size_of_the_scheme() -> None:
    assert set(GROUP_SIZES) == set(schemes.SCHEMES["w4a4"].group_sizes)
