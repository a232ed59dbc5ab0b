"""The mma.sync ops of Ampere and Ada on a CPU: equal to the schemes' arithmetic, honest about their
inputs.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool import layouts, schemes
from qtool.errors import QtoolError
from qtool.kernels.activation.arrangement import arrange, disarrange
from qtool.kernels.activation.quantize_packed_groups import (
    pack_tokens,
    quantize_packed_groups,
    unpack_tokens,
)
from qtool.kernels.mma.gemm import NARROW_TILES, TILES, MmaTile, choose
from qtool.kernels.mma.w4a8 import w4a8_mma_gemm
from qtool.kernels.mma.w4ax import w4ax_mma_gemm
from qtool.layouts.compute_aware import COMPUTE_AWARE
from tests.kernels.conftest import arguments

W4A8 = [("w4a8-qoq-g128", 128), ("w4a8-qoq", None), ("w4a8-lqq", 64), ("w4a8-lqq", 32)]
W4AX = [
    ("w4a4", "apex4", 128),
    ("w4a4", "apex4", 32),
    ("w4a4", "apex4", None),
    ("w4ax-fmpq", "w4ax-interleaved", 128),
]
EIGHT_BIT = torch.tensor([1, 0], dtype=torch.uint8)


w4a8_arguments = partial(arguments, n=96, layout=COMPUTE_AWARE)


def w4ax_arguments(scheme: str, layout: str, group: int | None) -> tuple[dict[str, Any], Tensor]:
    """The same for packed tokens, the first of two blocks of 8 bits where the scheme has such."""
    generator = torch.Generator().manual_seed(2)
    weight, x = torch.randn(96, 256, generator=generator), torch.randn(5, 256, generator=generator)
    mixed = scheme == "w4ax-fmpq"
    s = schemes.get(scheme, group)
    if mixed:
        s = s.with_blocks(EIGHT_BIT)  # type: ignore[attr-defined]
    blocks = EIGHT_BIT if mixed else None
    params, where = s.fit(weight), layouts.get(layout)
    codes = s.quantize(weight, params)
    qx, sx = quantize_packed_groups(x, None, None, blocks, "none", 0.0, group, layout)
    given = {
        "x": qx,
        "sx": sx,
        "qweight": where.pack(codes)["qweight"],
        "scale": where.pack_group(params["scale"]),
        "eight_bit": blocks,
        "bias": None,
        "layout": layout,
        "group_size": group,
        "out_dtype": torch.float32,
    }
    return given, s.matmul(x, codes, params)


@pytest.mark.parametrize(("scheme", "group"), W4A8)
def test_w4a8_is_the_schemes_matmul(scheme: str, group: int | None) -> None:
    given, want = w4a8_arguments(scheme, group)
    torch.testing.assert_close(w4a8_mma_gemm(**given), want, rtol=1e-6, atol=0)
    torch.library.opcheck(w4a8_mma_gemm, tuple(given.values()))


@pytest.mark.parametrize(("scheme", "layout", "group"), W4AX)
def test_w4ax_is_the_schemes_matmul(scheme: str, layout: str, group: int | None) -> None:
    given, want = w4ax_arguments(scheme, layout, group)
    assert torch.equal(w4ax_mma_gemm(**given), want)
    torch.library.opcheck(w4ax_mma_gemm, tuple(given.values()))


@pytest.mark.parametrize(("scheme", "layout", "group"), W4AX)
def test_bare_sums(scheme: str, layout: str, group: int | None) -> None:
    given, _ = w4ax_arguments(scheme, layout, group)
    sums = w4ax_mma_gemm(**given | {"out_dtype": torch.int32})
    codes = layouts.get(layout).unpack({"qweight": given["qweight"]}, 96, 256, signed=True)
    natural = disarrange(unpack_tokens(given["x"], given["eight_bit"]), layout)
    assert torch.equal(sums.long(), natural.long() @ codes.long().t())


@pytest.mark.parametrize("eight_bit", [None, EIGHT_BIT])
def test_tokens_pack_and_unpack(eight_bit: Tensor | None) -> None:
    codes = torch.randint(-8, 8, (3, 256)).to(torch.int8)
    if eight_bit is not None:
        codes[:, :128] = torch.randint(-127, 128, (3, 128))
    assert torch.equal(unpack_tokens(pack_tokens(codes, eight_bit), eight_bit), codes)
    x = torch.randn(3, 256)
    torch.library.opcheck(
        quantize_packed_groups, (x, None, None, eight_bit, "none", 0.0, 128, "w4ax-interleaved")
    )


def test_packed_quantization_refuses_in_one_sentence() -> None:
    for group, layout in ((64, "apex4"), (128, "none")):
        with pytest.raises(QtoolError, match=f"layout '{layout}' and group size {group}"):
            quantize_packed_groups(
                torch.randn(3, 256), None, None, EIGHT_BIT, "none", 0.0, group, layout
            )
    with pytest.raises(QtoolError, match="quantize_packed_groups: no group size 48"):
        quantize_packed_groups(torch.randn(3, 96), None, None, None, "none", 0.0, 48, "apex4")


@pytest.mark.parametrize("layout", ["apex4", "w4ax-interleaved"])
def test_packed_tokens_lie_as_the_layouts_weights_do(layout: str) -> None:
    """So that the words of both meet in an s4 instruction, whichever inputs they hold."""
    codes = torch.randint(-8, 8, (8, 64)).to(torch.int8)
    stored = layouts.get(layout).pack(codes)["qweight"]
    rows = stored.view(2, 8, 16).transpose(0, 1).flatten(1) if layout == "apex4" else stored
    assert torch.equal(pack_tokens(arrange(codes, layout), None), rows)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scheme", "w4a8-qo", "did you mean w4a8-qoq"),
        ("group_size", 48, "no group size 48"),
        (
            "x",
            torch.zeros(5, 200, dtype=torch.int8),
            "N = 96 and K = 200 must be multiples of 32 and 128",
        ),
        (
            "qweight",
            torch.zeros(96, 128, dtype=torch.uint8),
            "qweight is torch.uint8; expected torch.int8",
        ),
        ("s2", None, "s2 is missing"),
        ("out_dtype", torch.float64, "out_dtype is torch.float64"),
    ],
)
def test_w4a8_refuses_in_one_sentence(name: str, value: object, message: str) -> None:
    given, _ = w4a8_arguments("w4a8-qoq-g128", 128)
    with pytest.raises(QtoolError, match=message) as error:
        w4a8_mma_gemm(**given | {name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layout", "apex", "did you mean apex4"),
        ("group_size", 64, r"no group size 64; accepted: \(128,\)"),
        ("out_dtype", torch.float64, "out_dtype is torch.float64"),
        ("x", torch.zeros(5, 256, dtype=torch.int8), "x is torch.int8; expected torch.uint8"),
        (
            "eight_bit",
            torch.zeros(3, dtype=torch.uint8),
            r"eight_bit has shape \(3,\); expected \(2,\)",
        ),
    ],
)
def test_w4ax_refuses_in_one_sentence(name: str, value: object, message: str) -> None:
    given, _ = w4ax_arguments("w4ax-fmpq", "w4ax-interleaved", 128)
    with pytest.raises(QtoolError, match=message) as error:
        w4ax_mma_gemm(**given | {name: value})
    assert "\n" not in str(error.value)


def test_tiles_hold_the_tokens_and_fill_the_chip() -> None:
    chosen = [
        choose(TILES, m, n, 108)
        for m, n in ((1, 4096), (17, 4096), (64, 4096), (64, 28672), (4096, 4096))
    ]
    assert chosen == [*NARROW_TILES, MmaTile(8, 1, 64), MmaTile(8, 1, 128)]
    assert choose(NARROW_TILES, 4096, 4096, 108) == MmaTile(4, 2, 32)
    assert all(choose((tile,), m, 4096, 108) == tile for tile in TILES for m in (1, 4096))


@pytest.mark.cuda
@pytest.mark.parametrize("case", [*W4A8, *W4AX], ids=str)
def test_equals_the_cpu_reference(case: tuple[Any, ...]) -> None:
    op, make = (w4a8_mma_gemm, w4a8_arguments) if case in W4A8 else (w4ax_mma_gemm, w4ax_arguments)
    given, _ = make(*case)  # type: ignore[operator]
    there = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in given.items()}
    torch.testing.assert_close(op(**there).cpu(), op(**given), rtol=1e-6, atol=1e-5)
    torch.library.opcheck(op, tuple(there.values()))
