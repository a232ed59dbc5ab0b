"""LiquidQuant: the two-instruction dequantization over all codes, scales and legal offsets."""

import pytest
import torch

from qtool.errors import CheckFailed
from qtool.schemes import lqq_triton
from qtool.schemes.arithmetic.activation import PER_TOKEN_S8
from qtool.schemes.lqq import LiquidQuant


def test_worked_example_of_the_paper() -> None:
    q4, s2, low = 15, 15, -104
    assert q4 * s2 + (128 + low) == 249
    assert 249 ^ 128 == 121 == 225 - 104
    params = {"s1": torch.ones(1), "s2": torch.tensor([[15]], dtype=torch.uint8)}
    params["offset"] = torch.tensor([[128 - 104]], dtype=torch.uint8)
    codes = torch.full((1, 64), 15, dtype=torch.uint8)
    assert LiquidQuant().level2(codes, params).eq(121).all()


def test_imad_and_xor_on_four_bytes_of_a_word() -> None:
    """Every code, scale and offset that a group can have, with no carry between the bytes."""
    q4, s2, offset = torch.meshgrid(
        torch.arange(16), torch.arange(1, 17), torch.arange(9, 248), indexing="ij"
    )
    legal = 15 * s2 + offset <= 255
    q4, s2, offset = q4[legal], s2[legal], offset[legal]
    others = [(q4 + shift) % 16 for shift in (0, 5, 10, 15)]
    word = sum(code << (8 * byte) for byte, code in enumerate(others))
    word = (word * s2 + offset * 0x01010101) ^ 0x80808080
    assert (word >> 32 == 0).all()
    for byte, code in enumerate(others):
        value = (word >> (8 * byte)) & 0xFF
        signed = torch.where(value > 127, value - 256, value)
        assert torch.equal(signed, code * s2 + offset - 128)


def test_level2_is_that_formula() -> None:
    scheme, weight = LiquidQuant(64), torch.randn(16, 512)
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    s2 = params["s2"].repeat_interleave(64, 1).long()
    byte = (codes.long() * s2 + params["offset"].repeat_interleave(64, 1)) ^ 0x80
    assert torch.equal(scheme.level2(codes, params), byte.to(torch.uint8).view(torch.int8))


def test_parameters_follow_the_paper() -> None:
    weight = torch.randn(8, 256)
    s1 = weight.abs().amax(1) / 119
    q8 = torch.round(weight / s1[:, None]).clamp(-119, 119).view(8, 4, 64)
    low, high = q8.amin(-1), q8.amax(-1)
    s2 = torch.round((high - low) / 15).clamp(1, 16)
    q4 = torch.round((q8 - low[..., None]) / s2[..., None]).clamp(0, 15)
    params = LiquidQuant(64).fit(weight)
    assert torch.equal(params["s1"], s1)
    assert torch.equal(params["s2"], s2.to(torch.uint8))
    assert torch.equal(params["offset"], (low + 128).to(torch.uint8))
    assert torch.equal(LiquidQuant(64).quantize(weight, params), q4.to(torch.uint8).flatten(1))


def test_matmul_is_exact() -> None:
    scheme, weight, x = LiquidQuant(64), torch.randn(16, 512), torch.randn(7, 512)
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    qx, sx = PER_TOKEN_S8.quantize(x)
    integers = qx.double() @ scheme.level2(codes, params).double().t()
    assert torch.equal(scheme.matmul(x, codes, params), integers.float() * sx * params["s1"])


def test_a_group_of_one_value_costs_nothing() -> None:
    weight = torch.arange(1.0, 9).repeat_interleave(64).expand(2, 512)
    scheme = LiquidQuant(64)
    params = scheme.fit(weight)
    assert params["s2"].eq(1).all() and scheme.quantize(weight, params).eq(0).all()
    error = scheme.dequantize(scheme.quantize(weight, params), params) - weight
    assert error.abs().max() <= params["s1"].max() / 2 + 1e-6


@pytest.mark.parametrize(
    "s2, offset, code", [(16, 16, 15), (17, 9, 1), (0, 9, 1), (1, 8, 0), (1, 248, 0), (16, 9, 16)]
)
def test_check_refuses_what_would_carry(s2: int, offset: int, code: int) -> None:
    params = {
        "s1": torch.ones(1),
        "s2": torch.tensor([[s2]]).byte(),
        "offset": torch.tensor([[offset]]).byte(),
    }
    with pytest.raises(CheckFailed):
        LiquidQuant().check(torch.full((1, 64), code, dtype=torch.uint8), params)


@pytest.mark.cuda
@pytest.mark.parametrize("shape", [(5, 64), (48, 4096)])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_the_fused_rounding_is_the_schemes_own(
    shape: tuple[int, int], scale_dtype: torch.dtype
) -> None:
    scheme = LiquidQuant(64, scale_dtype)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 0.02
    params = scheme.fit(weight, clip=0.8, group_clip=0.9)
    expected = scheme.fake_weight(weight, params)
    on_device = {name: t.cuda() for name, t in params.items()}
    assert torch.equal(scheme.fake_weight(weight.cuda(), on_device).cpu(), expected)
    assert torch.equal(scheme.weight_error(weight.cuda(), on_device).cpu(), expected - weight)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "k"), [(5, 128), (7, 384)])
def test_parameters_fitted_by_one_kernel_are_those_of_a_cpu(
    n: int, k: int, dtype: torch.dtype
) -> None:
    scheme, weight = LiquidQuant(64, dtype), 3 * torch.rand(n, 1) * torch.randn(n, k)
    weight[0] = 0
    ranges = scheme.range(weight)
    by_row, by_group = 0.6 + 0.4 * torch.rand(n), 0.6 + 0.4 * torch.rand(n, k // 64)
    for clip, group_clip in (
        (1.0, 1.0),
        (0.7, by_group),
        (by_row, 0.83),
        (by_row, torch.tensor(0.9)),
    ):
        moved = (
            x.to("cuda") if isinstance(x, torch.Tensor) else x for x in (*ranges, clip, group_clip)
        )
        fitted = lqq_triton.fit(*moved, dtype)
        expected = scheme.fit_range(*ranges, clip=clip, group_clip=group_clip)
        assert fitted.keys() == expected.keys()
        for name, theirs in expected.items():
            assert torch.equal(fitted[name].cpu(), theirs)
