"""FMPQ: which blocks are 8-bit, the permutation that makes them few, and the arithmetic that
follows the map.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qtool.errors import CheckFailed, QtoolError
from qtool.schemes import fmpq_blocks
from qtool.schemes.arithmetic.products import fma
from qtool.schemes.fmpq import Fmpq


def statistics(outliers: list[int], channels: int = 1024) -> torch.Tensor:
    amax = torch.rand(channels, generator=torch.Generator().manual_seed(0)) + 0.5
    amax[outliers] *= 50
    return amax


def test_scattered_outliers_are_gathered_into_one_block() -> None:
    amax = statistics([3, 200, 420, 777, 1000])
    outliers = fmpq_blocks.outlier_channels(amax)
    assert fmpq_blocks.eight_bit_blocks(amax, outliers, 8).sum() == 5
    plan = fmpq_blocks.plan_blocks(amax)
    assert sorted(plan.permutation.tolist()) == list(range(1024))
    assert plan.eight_bit.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert set(plan.permutation[:5].tolist()) == {3, 200, 420, 777, 1000}
    assert fmpq_blocks.w4a4_share([(plan.eight_bit, 512)]) == 7 / 8


def test_no_outlier_moves_nothing() -> None:
    plan = fmpq_blocks.plan_blocks(statistics([]))
    assert torch.equal(plan.permutation, torch.arange(1024)) and plan.eight_bit.sum() == 0


@settings(max_examples=60)
@given(st.integers(0, 1024), st.integers(0, 99), st.none() | st.integers(0, 9), st.floats(0, 1))
def test_outliers_fill_as_few_blocks_as_possible(
    count: int, seed: int, cap: int | None, share: float
) -> None:
    order = torch.randperm(1024, generator=torch.Generator().manual_seed(seed))
    amax = statistics(order[:count].tolist())
    outliers = fmpq_blocks.outlier_channels(amax)
    plan = fmpq_blocks.plan_blocks(amax, max_8bit_blocks=cap, min_w4a4_share=share)
    blocks = int(plan.eight_bit.sum())
    assert blocks <= -(-int(outliers.sum()) // 128)
    assert cap is None or blocks <= cap
    assert 1 - blocks / 8 >= share - 1e-9
    if cap is None and share == 0:
        assert blocks == -(-int(outliers.sum()) // 128)
        assert not (outliers[plan.permutation].view(8, 128).any(1) & (plan.eight_bit == 0)).any()


def test_ratio_zero_fills_the_share_exactly() -> None:
    plan = fmpq_blocks.plan_blocks(statistics([]), ratio=0, min_w4a4_share=0.75)
    assert plan.eight_bit.tolist() == [1, 1, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("blocks", range(1, 41))
def test_a_share_of_whole_blocks_is_met_exactly(blocks: int) -> None:
    """``blocks * (1 - share)`` falls below the whole number that it stands for now and then."""
    for eight_bit in range(blocks + 1):
        share = (blocks - eight_bit) / blocks
        assert fmpq_blocks.block_cap(128 * blocks, None, share) == eight_bit


def test_share_weighs_layers_by_their_work() -> None:
    one, none = torch.tensor([1, 0]), torch.tensor([0, 0, 0, 0])
    assert fmpq_blocks.w4a4_share([(one, 100), (none, 300)]) == 1 - 100 / (200 + 1200)


def test_refuses_bad_statistics_and_caps() -> None:
    with pytest.raises(QtoolError, match="100 input channels are not divisible by 128"):
        fmpq_blocks.plan_blocks(torch.ones(100))
    with pytest.raises(QtoolError, match="NaN"):
        fmpq_blocks.plan_blocks(torch.full((128,), float("nan")))
    with pytest.raises(QtoolError, match=r"share of 1\.5; expected 0 to 1"):
        fmpq_blocks.plan_blocks(torch.ones(128), min_w4a4_share=1.5)
    with pytest.raises(QtoolError, match="at most -1 8-bit blocks"):
        fmpq_blocks.plan_blocks(torch.ones(128), max_8bit_blocks=-1)


def test_map_rides_in_the_parameters() -> None:
    eight_bit = torch.tensor([1, 0, 0, 1])
    scheme, weight = Fmpq().with_blocks(eight_bit), torch.randn(8, 512)
    params = scheme.fit(weight)
    assert params["eight_bit"].dtype == torch.uint8 and params["eight_bit"].tolist() == [1, 0, 0, 1]
    assert Fmpq().fit(weight)["eight_bit"].tolist() == [0, 0, 0, 0]
    with pytest.raises(QtoolError, match="a map of \\(4,\\) blocks for a weight of 2 blocks"):
        scheme.fit(torch.randn(8, 256))
    params["eight_bit"][2] = 2
    with pytest.raises(CheckFailed, match="eight_bit is 0 or 1"):
        scheme.check(scheme.quantize(weight, params), params)


def test_matmul_follows_the_map() -> None:
    weight, x = torch.randn(6, 384), torch.randn(5, 384)
    params = Fmpq().with_blocks(torch.tensor([1, 0, 1])).fit(weight)
    codes = Fmpq().quantize(weight, params)
    expected = torch.zeros(5, 6)
    for b, top in enumerate((127, 7, 127)):
        block = slice(128 * b, 128 * b + 128)
        sx = x[:, block].abs().amax(1, keepdim=True) / top
        qx = torch.round(x[:, block] / sx)
        sums = (qx.double() @ codes[:, block].double().t()).float()
        expected = fma(sums * sx, params["scale"][:, b], expected)
    assert torch.equal(Fmpq().matmul(x, codes, params), expected)


def test_eight_bit_blocks_lower_the_error() -> None:
    x, weight = torch.randn(32, 512), torch.randn(16, 512)
    x[:, 130] *= 60
    exact = x @ weight.t()
    errors = []
    for eight_bit in ([0, 0, 0, 0], [0, 1, 0, 0]):
        scheme = Fmpq().with_blocks(torch.tensor(eight_bit))
        params = scheme.fit(weight)
        errors.append((scheme.fake_activation(x, params) @ weight.t() - exact).norm().item())
    assert errors[1] < 0.4 * errors[0]
