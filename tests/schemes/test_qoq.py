"""QoQ per channel and progressive: zero points, byte arithmetic, the token sum."""

import pytest
import torch

from qtool.calibration.rounding.gptq.gptq import GptqOptions, gptq
from qtool.errors import CheckFailed
from qtool.schemes.arithmetic.activation import PER_TOKEN_S8
from qtool.schemes.base import Scheme
from qtool.schemes.lqq import LiquidQuant
from qtool.schemes.qoq import QoQ
from qtool.schemes.qoq_group import ProgressiveQoQ


def test_per_channel_parameters_follow_the_paper() -> None:
    weight = torch.randn(8, 256) + 0.3
    low, high = weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)
    scale = high / 15 - low / 15
    zero = torch.round(-low / scale)
    codes = (torch.round(weight / scale[:, None]) + zero[:, None]).clamp(0, 15)
    params = QoQ().fit(weight)
    assert torch.equal(params["s1"], scale)
    assert torch.equal(params["zero"], zero.to(torch.uint8))
    assert torch.equal(QoQ().quantize(weight, params), codes.to(torch.uint8))


@pytest.mark.parametrize("scheme", [QoQ(), ProgressiveQoQ(), LiquidQuant()], ids=lambda s: s.name)
def test_a_row_of_zeros_has_scale_one_and_stays_zero(scheme: Scheme) -> None:
    weight = torch.randn(3, 256)
    weight[1] = 0
    params = scheme.fit(weight)
    assert params["s1"][1] == 1
    assert scheme.dequantize(scheme.quantize(weight, params), params)[1].eq(0).all()


@pytest.mark.parametrize("sign, zero", [(1, 0), (-1, 15)])
def test_one_sided_channel_keeps_its_range(sign: int, zero: int) -> None:
    """A range that left out zero would put its zero point outside 0..15 and clip the channel."""
    weight = sign * (torch.rand(4, 256) * 0.1 + 0.9)
    params = QoQ().fit(weight)
    assert params["zero"].eq(zero).all()
    error = QoQ().dequantize(QoQ().quantize(weight, params), params) - weight
    assert error.abs().max() <= 0.501 * params["s1"].max()


def test_per_channel_matmul_is_exact() -> None:
    weight, x = torch.randn(16, 512) + 0.5, torch.randn(7, 512) + 1
    params = QoQ().fit(weight)
    codes = QoQ().quantize(weight, params)
    qx, sx = PER_TOKEN_S8.quantize(x)
    integers = qx.double() @ (codes.double() - params["zero"].double()[:, None]).t()
    assert torch.equal(QoQ().matmul(x, codes, params), integers.float() * sx * params["s1"])


def test_exact_token_sum_beats_the_sum_of_the_unquantized_input() -> None:
    """Equation 13's sum is close, but Y is then no longer the product of the quantized operands."""
    weight, x = torch.randn(64, 1024) + 0.2, torch.randn(32, 1024)
    params = QoQ().fit(weight)
    codes = QoQ().quantize(weight, params)
    qx, sx = PER_TOKEN_S8.quantize(x)
    exact = (sx * qx).double() @ QoQ().dequantize(codes, params).double().t()
    y = QoQ().matmul(x, codes, params).double()
    paper = (qx.double() @ codes.double().t()) * sx * params["s1"] - x.double().sum(
        1, keepdim=True
    ) * (params["zero"] * params["s1"])
    assert (y - exact).abs().max() < 1e-4 < (paper - exact).abs().max()


def test_level1_range_that_would_overflow_without_protection() -> None:
    """QServe section 3.1: a group in [-113, 120] gives s2 = 16, z = 7 and (15 - 7) * 16 = 128."""
    weight = torch.zeros(1, 128)
    weight[0, 0], weight[0, 1] = -113, 120
    scheme = ProgressiveQoQ()
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    scheme.check(codes, params)
    overflowing = {
        "s1": torch.ones(1),
        "s2": torch.tensor([[16]]).byte(),
        "zero": torch.tensor([[7]]).byte(),
    }
    assert scheme.grid(overflowing).high.item() == 14
    with pytest.raises(CheckFailed, match="<= 127"):
        scheme.check(torch.full((1, 128), 15, dtype=torch.uint8), overflowing)


def test_bounds_are_exactly_the_codes_that_do_not_overflow() -> None:
    s2, zero = torch.meshgrid(torch.arange(1, 17), torch.arange(16), indexing="ij")
    params = {"s1": torch.ones(16), "s2": s2.byte(), "zero": zero.byte()}
    grid = ProgressiveQoQ().grid(params)
    codes = torch.arange(16)
    value = (codes - zero[..., None]) * s2[..., None]
    fits = (value >= -128) & (value <= 127) & (codes * s2[..., None] <= 255)
    assert torch.equal(fits, (codes >= grid.low[..., None]) & (codes <= grid.high[..., None]))


def test_multiply_then_subtract_in_bytes() -> None:
    """One 32-bit multiplication and a bytewise subtraction give (Q4 - z) * s2 in each byte."""
    q4, s2, zero = torch.meshgrid(
        torch.arange(16), torch.arange(1, 17), torch.arange(16), indexing="ij"
    )
    value = (q4 - zero) * s2
    legal = (value >= -128) & (value <= 127)
    q4, s2, zero, value = (t[legal] for t in (q4, s2, zero, value))
    product = (q4 * 0x01010101) * s2
    assert (product >> 32 == 0).all()
    for byte in range(4):
        difference = ((product >> (8 * byte)) & 0xFF) - zero * s2
        assert torch.equal(difference.to(torch.uint8).view(torch.int8).long(), value)


def test_progressive_parameters_follow_the_paper() -> None:
    weight = torch.randn(8, 512) + 0.2
    scheme = ProgressiveQoQ()
    s1 = weight.abs().amax(1) / 119
    q8 = torch.round(weight / s1[:, None]).clamp(-119, 119).view(8, 4, 128)
    low, high = q8.amin(-1).clamp(max=0), q8.amax(-1).clamp(min=0)
    s2 = torch.round((high - low) / 15).clamp(1, 16)
    zero = torch.round(-low / s2).clamp(0, 15)
    codes = (torch.round(q8 / s2[..., None]) + zero[..., None]).clamp(0, 15)
    params = scheme.fit(weight)
    assert torch.equal(params["s2"], s2.byte()) and torch.equal(params["zero"], zero.byte())
    assert torch.equal(scheme.quantize(weight, params), codes.byte().flatten(1))


def test_rounding_once_is_nearer_than_level_by_level_and_legal() -> None:
    """Rounding to nearest is the paper's; GPTQ rounds onto the grid, as QServe's own tool."""
    weight, scheme = torch.randn(256, 512), ProgressiveQoQ()
    params = scheme.fit(weight)
    twice = scheme.quantize(weight, params)
    once = scheme.grid(params).nearest(scheme.groups(weight)).flatten(1).to(torch.uint8)
    scheme.check(once, params)
    plain = GptqOptions(clip_steps=1, residual=0, rounds=0)
    codes, fitted = gptq(weight, scheme, hessian=torch.eye(512), options=plain)
    assert all(torch.equal(fitted[name], params[name]) for name in params)
    assert torch.equal(codes, once) and not torch.equal(codes, twice)
    errors = [(scheme.dequantize(found, params) - weight).norm() for found in (once, twice)]
    assert errors[0] < errors[1]


def test_the_search_widens_a_range_that_an_integer_scale_would_cut() -> None:
    """20.7 steps of level 1 get s2 = 1 and 15 of them; with s2 = 2 all are within half a code."""
    scheme, weight = ProgressiveQoQ(), torch.zeros(2, 256)
    weight[:, 0], weight[:, 128:] = 119, torch.tensor([20.7, -20.7])[:, None]
    assert scheme.fit(weight)["s2"][:, 1].tolist() == [1, 1]
    options = GptqOptions(residual=0, rounds=0)
    codes, params = gptq(weight, scheme, hessian=torch.eye(256), options=options)
    assert params["s2"][:, 1].tolist() == [2, 2]
    scheme.check(codes, params)
    assert (scheme.dequantize(codes, params) - weight)[:, 128:].abs().max() <= 1
    ratios = options.clip_ratios(scheme)
    assert ratios[0] == pytest.approx(1.4) and 1 in ratios and ratios[-1] == pytest.approx(0.6)
    assert max(options.clip_ratios(QoQ())) == 1
    assert GptqOptions(clip_steps=1).clip_ratios(scheme) == [1]


def test_one_sided_group_keeps_its_zero_point() -> None:
    weight = torch.rand(4, 256) * 0.1 + 0.9
    scheme = ProgressiveQoQ()
    params = scheme.fit(weight)
    assert params["zero"].eq(0).all()
    error = scheme.dequantize(scheme.quantize(weight, params), params) - weight
    assert error.abs().max() <= 0.5 * (scheme.grid(params).step.max() + params["s1"].max()) + 1e-6


def test_progressive_matmul_is_exact() -> None:
    scheme, weight, x = ProgressiveQoQ(), torch.randn(16, 512), torch.randn(7, 512)
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    qx, sx = PER_TOKEN_S8.quantize(x)
    steps = codes.long() - params["zero"].repeat_interleave(128, 1).long()
    q8 = steps * params["s2"].repeat_interleave(128, 1).long()
    assert torch.equal(scheme.level2(codes, params).long(), q8)
    integers = qx.double() @ q8.double().t()
    assert torch.equal(scheme.matmul(x, codes, params), integers.float() * sx * params["s1"])


@pytest.mark.parametrize("scheme", [ProgressiveQoQ(), LiquidQuant()], ids=lambda s: s.name)
def test_widest_group_has_step_16_and_is_not_clipped(scheme: ProgressiveQoQ | LiquidQuant) -> None:
    """Q8 from -119 to 119: 238 / 15 rounds to 16, and both ends come back within half a step."""
    weight = torch.linspace(-119, 119, 239).repeat_interleave(2)[:384].clone()
    weight[::128], weight[1::128] = -119, 119
    params = scheme.fit(weight[None])
    assert int(params["s2"].max()) == 16
    error = scheme.dequantize(scheme.quantize(weight[None], params), params) - weight
    assert error.abs().max() <= 8
