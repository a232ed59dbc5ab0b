"""The one-level schemes: W8A8, W4A16 (dense and 2:4) and W4A4."""

from itertools import product

import pytest
import torch

from qtool import schemes
from qtool.errors import CheckFailed, QtoolError
from qtool.schemes.arithmetic.activation import PER_TOKEN_S8, Activation
from qtool.schemes.arithmetic.products import fma, int_matmul
from qtool.schemes.w4a4 import Apex4
from qtool.schemes.w4a16 import Marlin
from qtool.schemes.w4a16_24 import SparseMarlin, keep_largest
from qtool.schemes.w8a8 import SmoothQuant


@pytest.mark.parametrize(
    "name, divisor, zero", [("w8a8", 127, 0), ("w4a16", 7.5, 8), ("w4a4", 7, 0)]
)
def test_parameters_follow_the_formula(name: str, divisor: float, zero: int) -> None:
    weight = torch.randn(8, 512)
    scheme = schemes.get(name)
    grouped = scheme.groups(weight)
    scale = grouped.abs().amax(-1) / divisor
    low, high = {"w8a8": (-127, 127), "w4a16": (0, 15), "w4a4": (-8, 7)}[name]
    codes = (torch.round(grouped / scale[..., None]) + zero).clamp(low, high)
    params = scheme.fit(weight)
    assert torch.equal(params["scale"], scale)
    assert torch.equal(scheme.quantize(weight, params), codes.flatten(1).to(scheme.code_dtype))
    assert torch.equal(
        scheme.dequantize(codes.flatten(1), params), ((codes - zero) * scale[..., None]).flatten(1)
    )


def test_w4a16_is_never_half_a_step_off_by_more() -> None:
    """Dividing by 7.5 uses all sixteen codes and still clips nothing by more than half a step."""
    weight = torch.randn(64, 512)
    params = Marlin().fit(weight)
    codes = Marlin().quantize(weight, params)
    error = Marlin().groups(Marlin().dequantize(codes, params) - weight)
    assert (error.abs() <= 0.5001 * params["scale"][..., None]).all()
    assert int(codes.min()) == 0 and int(codes.max()) == 15


def test_w8a8_matmul_is_exact() -> None:
    weight, x = torch.randn(16, 512), torch.randn(7, 512)
    params = SmoothQuant().fit(weight)
    codes = SmoothQuant().quantize(weight, params)
    qx, sx = PER_TOKEN_S8.quantize(x)
    integers = qx.double() @ codes.double().t()
    assert torch.equal(
        SmoothQuant().matmul(x, codes, params), integers.float() * sx * params["scale"][:, 0]
    )


def test_int8_products_do_not_saturate() -> None:
    """Extremes that 16-bit accumulation of byte pairs would clip."""
    a = torch.full((3, 4096), 127, dtype=torch.int8)
    b = torch.full((5, 4096), -128, dtype=torch.int8)
    assert int_matmul(a, b).eq(-127 * 128 * 4096).all()


@pytest.mark.parametrize("size", [32, 128, None])
def test_w4a4_sums_groups_of_exact_integers(size: int | None) -> None:
    scheme, weight, x = Apex4(size), torch.randn(6, 256), torch.randn(4, 256)
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    qx, sx = Activation(4, size).quantize(x)
    partial = torch.einsum(
        "mgk,ngk->gmn",
        qx.double().view(4, -1, size or 256),
        codes.double().view(6, -1, size or 256),
    )
    expected = torch.zeros(4, 6)
    for g in range(len(partial)):
        expected = fma(partial[g].float() * sx[:, g, None], params["scale"][:, g], expected)
    assert torch.equal(scheme.matmul(x, codes, params), expected)


def test_2_of_4_are_kept_and_zeros_are_code_8() -> None:
    weight = torch.randn(16, 512)
    scheme = SparseMarlin()
    pruned = scheme.prune(weight)
    assert (pruned.view(16, -1, 4) != 0).sum(-1).eq(2).all()
    largest = weight.abs().view(16, -1, 4).topk(2, -1).values
    assert torch.equal(pruned.abs().view(16, -1, 4).topk(2, -1).values, largest)
    codes = scheme.quantize(weight, scheme.fit(weight))
    assert codes[pruned == 0].eq(8).all()


def test_a_weight_that_is_2_of_4_already_passes_unchanged() -> None:
    """SparseGPT keeps other weights than the largest; its choice stands."""
    weight = torch.randn(16, 512)
    weight.view(16, -1, 4)[..., 1:3] = 0
    scheme = SparseMarlin()
    assert torch.equal(scheme.prune(weight), weight)
    assert torch.equal(
        scheme.quantize(weight, scheme.fit(weight)), Marlin().quantize(weight, Marlin().fit(weight))
    )


def test_of_equal_magnitudes_the_earlier_stay() -> None:
    for four in product((0.0, 1.0, -1.0, 2.0), repeat=4):
        kept = keep_largest(torch.tensor([four]))[0]
        order = sorted(range(4), key=lambda i: (-abs(four[i]), i))
        assert kept.nonzero().flatten().tolist() == sorted(order[:2]), four


def test_check_finds_a_third_weight_of_four() -> None:
    weight, scheme = torch.randn(4, 512), SparseMarlin()
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    codes[2, 100:104] = torch.tensor([9, 8, 7, 9], dtype=torch.uint8)
    with pytest.raises(CheckFailed, match=r"at most 2 of 4.*\(2, 25\)"):
        scheme.check(codes, params)


def test_2_of_4_needs_fours() -> None:
    with pytest.raises(QtoolError, match="30 input channels are not divisible by 4"):
        SparseMarlin(None).fit(torch.randn(2, 30))


def test_small_rows_keep_their_steps_in_fp16_scales() -> None:
    """A scale below fp16's normal range is stored as a subnormal, not raised to 6e-5."""
    weight = torch.randn(4, 512) * 1e-3
    scheme = SmoothQuant(scale_dtype=torch.float16)
    params = scheme.fit(weight)
    error = scheme.dequantize(scheme.quantize(weight, params), params) - weight
    assert params["scale"].max() < 6e-5
    assert error.norm() / weight.norm() < 0.015


def test_w4a4_clips_to_the_full_range_of_equation_7() -> None:
    weight = torch.randn(4, 512)
    codes = Apex4().quantize(weight, Apex4().fit(weight, clip=0.5))
    assert int(codes.min()) == -8 and int(codes.max()) == 7
