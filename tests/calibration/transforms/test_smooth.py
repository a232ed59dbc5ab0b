import copy

import pytest
import torch

from qtool.calibration.forwards import run
from qtool.calibration.method import check_order
from qtool.calibration.options import check_options
from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.statistics import collect
from qtool.calibration.transforms import smooth
from qtool.calibration.transforms.balance import balancing_factors
from qtool.calibration.transforms.norm_fusion import NormFusion
from qtool.calibration.transforms.rotate import Rotate
from qtool.calibration.transforms.smooth import (
    Smooth,
    search,
    smooth_factors,
    smoothing_factor,
)
from qtool.errors import QtoolError
from qtool.models.parts import Fold
from qtool.schemes import get
from qtool.schemes.arithmetic.online_hadamard import rotate
from tests.calibration.conftest import CONFIGS, make_model


def test_logits_stay(any_model, transformed, logits):
    smoothed = transformed(any_model, [Smooth(steps=4)])
    torch.testing.assert_close(logits(smoothed), logits(any_model), rtol=1e-3, atol=2e-3)


def test_what_smooth_factors_cannot_take_is_named():
    weight, x, scheme = torch.ones(8, 128), torch.ones(4, 128), get("w8a8")
    for weights, inputs, schemes in (
        ([weight], x[:, :64], [scheme]),
        ([weight], x[None], [scheme]),
        ([weight], x[:0], [scheme]),
        ([weight, weight[:, :64]], x, [scheme, scheme]),
        ([weight], x, []),
        ([], x, []),
    ):
        with pytest.raises(QtoolError, match=r"are given; weights \[N, K\], inputs \[T, K\]"):
            smooth_factors(weights, inputs, schemes)
    with pytest.raises(QtoolError, match="the inputs hold NaN or Inf"):
        smooth_factors([weight], x * float("nan"), [scheme])
    with pytest.raises(QtoolError, match="the weights hold NaN or Inf"):
        smooth_factors([weight, weight * float("inf")], x, [scheme, scheme])


def rounding_error(block, batches):
    """Relative squared error of the block's output with every linear rounded to nearest."""
    exact = torch.cat([run(block, batch) for batch in batches])
    for name, scheme in block.schemes.items():
        params = block.fit(name)
        block.install({name: Rounded(scheme.quantize(block.weight(name), params), params)})
    output = torch.cat([run(block, batch) for batch in batches])
    return float((output - exact).square().sum() / exact.square().sum())


@pytest.mark.parametrize("scheme", (("w4a8-lqq", 32), ("w4a4", 32), ("w8a8", None)))
def test_outlier_models_recover(llama, blocks, with_outliers, scheme):
    clean = rounding_error(*blocks(copy.deepcopy(llama), get(*scheme))[0])
    outliers = with_outliers(llama)
    broken = rounding_error(*blocks(copy.deepcopy(outliers), get(*scheme))[0])
    block, batches = blocks(outliers, get(*scheme))[0]
    Smooth().apply(block, batches)
    smoothed = rounding_error(block, batches)
    assert broken > 3 * clean
    assert smoothed < 1.3 * clean


def test_never_worse_than_not_smoothing_on_its_objective(any_model, blocks):
    for block, batches in blocks(any_model, get("w4a4", 32)):
        Smooth(steps=3).apply(block, batches)
        assert len(block.notes["smooth"]) == sum(
            g.fold is not Fold.ACTIVATION for g in block.family.folds()
        )
        for note in block.notes["smooth"].values():
            assert note["error"] <= note["error_unsmoothed"]


def test_the_first_tokens_are_looked_at(llama, blocks, monkeypatch):
    """Whole batches, until they hold enough of them."""
    monkeypatch.setattr(smooth, "MOST_TOKENS", 1)
    (one, batches), (other, _) = blocks(copy.deepcopy(llama))[0], blocks(copy.deepcopy(llama))[0]
    assert len(batches) > 1
    Smooth(steps=2).apply(one, batches)
    Smooth(steps=2).apply(other, batches[:1])
    assert one.notes == other.notes and "smooth" in one.notes
    for name in one.schemes:
        assert torch.equal(one.weight(name), other.weight(name))


def test_only_the_groups_asked_for(llama, blocks):
    block, batches = blocks(llama)[0]
    norm = block.weight("input_layernorm").clone()
    Smooth(groups=("heads", "product"), steps=2).apply(block, batches)
    assert torch.equal(block.weight("input_layernorm"), norm)
    assert set(block.notes["smooth"]) == {"self_attn.o_proj", "mlp.down_proj"}
    with pytest.raises(QtoolError, match="did you mean heads"):
        Smooth(groups=("head",))


def test_smoothquants_alpha_is_taken_as_it_is(llama, blocks):
    block, batches = blocks(llama, get("w8a8"))[0]
    group = next(group for group in block.family.folds() if group.fold is Fold.NORM)
    seen = collect(block, batches, [group.linears[0]], 8)[group.linears[0]]
    before = [block.weight(name).clone() for name in group.linears]
    w_amax = torch.cat(before).abs().amax(0)
    Smooth(groups=("norm",), alpha=0.5).apply(block, batches)
    factor = smoothing_factor(seen.amax, w_amax, 0.5, 0.5)
    for name, weight in zip(group.linears, before, strict=True):
        torch.testing.assert_close(block.weight(name), weight * factor)
    assert {note["alpha"] for note in block.notes["smooth"].values()} == {0.5}
    with pytest.raises(QtoolError, match=r"alpha is 1.5; expected .* at most 1"):
        check_options(Smooth, {"alpha": 1.5})


def test_a_block_without_quantized_linears_is_left_alone(llama, blocks):
    block, batches = blocks(llama)[0]
    block.schemes.clear()
    before = {name: t.clone() for name, t in block.module.state_dict().items()}
    Smooth().apply(block, batches)
    assert all(torch.equal(t, before[name]) for name, t in block.module.state_dict().items())


def test_reported_errors_are_mean_squares_of_the_quantized_outputs(llama, blocks):
    """Of all outputs of a group alike, though k and v are narrower than q."""
    block, batches = blocks(llama, get("w4a4", 32))[0]
    group = next(iter(block.family.folds()))
    seen = collect(block, batches, [group.linears[0]], 64)[group.linears[0]]
    weights = [block.weight(name).clone() for name in group.linears]
    assert len({len(weight) for weight in weights}) == 2
    scheme = block.schemes[group.linears[0]]
    factors, values = search(block, [group], [seen], Smooth(steps=2).grid())
    (factor,), ((alpha, beta, error, unsmoothed),) = factors, values

    def mean_square(factor):
        inputs, scaled = seen.sample / factor, [weight * factor for weight in weights]
        params = [scheme.fit(weight) for weight in scaled]
        rounded = torch.cat(list(map(scheme.fake_weight, scaled, params)))
        outputs = scheme.fake_activation(inputs, params[0]) @ rounded.T
        return (outputs - seen.sample @ torch.cat(weights).T).square().mean()

    torch.testing.assert_close(unsmoothed.float(), mean_square(torch.ones(())))
    torch.testing.assert_close(error.float(), mean_square(factor))
    amax = torch.cat(weights).abs().amax(0)
    torch.testing.assert_close(factor, smoothing_factor(seen.amax, amax, float(alpha), float(beta)))


def test_what_is_rotated_at_run_time_is_judged_as_rotated(llama, blocks):
    block, batches = blocks(llama, get("w4a8-lqq", 32))[0]
    down = "mlp.down_proj"
    seen = collect(block, batches, [down], 64)[down]
    scheme, weight, block.to_rotate = block.schemes[down], block.weight(down).clone(), {down}
    groups = [block.family.group_of(down)]
    factors, ((_, _, error, unsmoothed),) = search(block, groups, [seen], Smooth(steps=2).grid())

    def mean_square(factor):
        inputs, scaled = rotate(seen.sample / factor), rotate(weight * factor)
        params = scheme.fit(scaled)
        outputs = scheme.fake_activation(inputs, params) @ scheme.fake_weight(scaled, params).T
        return (outputs - seen.sample @ weight.T).square().mean()

    torch.testing.assert_close(unsmoothed.float(), mean_square(torch.ones(())))
    torch.testing.assert_close(error.float(), mean_square(factors[0]))


def test_dead_channels_move_with_the_others():
    """By the geometric mean of their factors, which an outlier shrinks; alone they keep 1."""
    amax = torch.tensor([0.0, 2.0, 1.0, 1.0, 64.0])
    weights = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0])
    factor = smoothing_factor(amax, weights, 1, 0)
    torch.testing.assert_close(factor, torch.tensor([0.5, 0.5, 0.125, 0.125, 8.0]))
    assert smoothing_factor(amax[:2], weights[:2], 0.5, 0.5).tolist() == [1, 1]
    assert smoothing_factor(torch.tensor([1.0, 4.0]), torch.ones(2), 1, 0).tolist() == [0.5, 2]


def test_channels_scaled_against_their_columns_leave_the_others_their_factors():
    """As if they had not been: the others' factors are searched from the same start."""
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=random), torch.randn(96, 64, generator=random)
    x[:, 5] *= 10  # no reason to balance it
    scale = torch.ones(64)
    scale[[3, 40]] = 1000
    scheme = get("w4a8-lqq", 32)
    plain, (*_, error, _) = smooth_factors([weight], x, [scheme], balance=True)
    same, _ = smooth_factors([weight], x, [scheme])
    assert torch.equal(plain, same)
    found, (*_, balanced, _) = smooth_factors([weight / scale], x * scale, [scheme], balance=True)
    *_, unbalanced, _ = smooth_factors([weight / scale], x * scale, [scheme])[1]
    assert abs(balanced - error) < (unbalanced - error) / 4
    others = scale == 1
    ratio = (found / plain)[others]
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), rtol=0.1, atol=0)


def test_the_error_before_is_that_of_no_factor_at_all():
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=random), torch.randn(96, 64, generator=random)
    x[:, 5] = 100
    none = torch.zeros(1, 2, dtype=torch.float64)
    factor, (*_, unsmoothed, same) = smooth_factors([weight], x, [get("w8a8")], grid=none)
    assert (factor == 1).all() and unsmoothed == same
    *_, error, before = smooth_factors([weight], x, [get("w8a8")], balance=True)[1]
    torch.testing.assert_close(before, unsmoothed)
    assert error < before / 10


def test_dead_channels_do_not_make_all_others_large():
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=random), torch.randn(96, 64, generator=random)
    x[:, 10:50] = 0  # as behind a ReLU
    x[:, 5] *= 100
    (*_, plain, before), (*_, balanced, _) = (
        smooth_factors([weight], x, [get("w8a8")], balance=balance)[1] for balance in (False, True)
    )
    assert balanced < 1.1 * plain < before / 10


def test_readers_in_16_bits_set_no_factor(blocks):
    found = []
    for size in (1, 1024):
        model = make_model(CONFIGS["qwen3-moe"])
        model.model.layers[0].mlp.gate.weight.data *= size  # sends tokens to the same experts
        block, batches = blocks(model, get("w8a8"))[0]
        Smooth(groups=("norm",), alpha=0.5).apply(block, batches)
        found.append(block.weight("post_attention_layernorm").clone())
    assert torch.equal(*found)


def test_a_massive_activation_costs_other_tokens_little():
    """Its channel has a factor of its own, and its token does not decide alone."""
    random = torch.Generator().manual_seed(0)
    weight, x = torch.randn(48, 64, generator=random), torch.randn(96, 64, generator=random)
    x *= torch.linspace(1, 4, 64)
    x[0, 5] = 2000
    scheme = get("w8a8")

    def of_others(balance):
        factor, _ = smooth_factors([weight], x, [scheme], balance=balance)
        return smooth_factors([weight * factor], x[1:] / factor, [scheme])[1][3]

    _, (*_, alone) = smooth_factors([weight], x[1:], [scheme])
    assert of_others(balance=True) < 1.5 * alone < of_others(balance=False)


def test_factors_of_a_balanced_channel_go_from_the_median_of_w_to_that_of_x():
    x = torch.tensor([1.0, 1, 1, 1, 64, 64, 0, 64])
    w = torch.tensor([1.0, 1, 1, 1, 1 / 16, 4, 1 / 16, 0])
    found = balancing_factors(x, w)
    torch.testing.assert_close(found[0], torch.tensor([1.0, 1, 1, 1, 16, 1, 16, 1]))
    torch.testing.assert_close(found[-1], torch.tensor([1.0, 1, 1, 1, 64, 64, 1, 64]))
    assert (found[:, :4] == 1).all() and (found[1:, 4:6] > found[:-1, 4:6] - 1e-4).all()
    assert (balancing_factors(torch.zeros(4), torch.ones(4)) == 1).all()


def test_rotating_after_smoothing_is_refused():
    with pytest.raises(QtoolError, match="rotate must come before smooth: a rotation mixes"):
        check_order([NormFusion(), Smooth(), Rotate()])
    with pytest.raises(QtoolError, match="smooth is listed twice"):
        check_order([Smooth(), Smooth()])
    check_order([NormFusion(), Rotate(), Smooth()])
