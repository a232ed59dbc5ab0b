"""Distillation starts from a rounding's codes, never ends worse, and stays on the grid."""

import copy
import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from qtool.calibration.batch import Batch, BlockArguments
from qtool.calibration.block import Block
from qtool.calibration.forwards import run
from qtool.calibration.kv.cache import kv_constants, quantized_kv
from qtool.calibration.options import check_options
from qtool.calibration.reference import Reference
from qtool.calibration.rounding.distill.distill import Distill, Distillation, iterations
from qtool.calibration.rounding.distill.learned_linear import LearnedLinear
from qtool.calibration.rounding.gptq import rounding as gptq_rounding
from qtool.calibration.rounding.rounded import Rounded
from qtool.errors import QtoolError
from qtool.schemes import SCHEMES, get
from tests.calibration.conftest import random_block

WITH_ENDS = ["w4a8-qoq", "w4a8-qoq-g128", "w4a8-lqq"]
QUICK = {"epochs": 3, "samples": 12, "weight_lr": 0.05}


@pytest.fixture
def block() -> tuple[Block, list]:
    lengths = (24, 17, 32, 20, 24, 30)
    return random_block(get("w4a4", 32), lengths, hidden_size=64, num_attention_heads=2)


def distilled(
    block: tuple[Block, list], **options
) -> tuple[dict[str, Rounded], list[float], float]:
    """The codes, the held-out loss by epoch, and the squared error of the quantized block on all
    inputs.
    """
    own, batches = copy.deepcopy(block)
    targets = [run(own, batch) for batch in batches]
    rounded = Distill(**QUICK | options).round(own, batches)
    for name, result in rounded.items():
        own.schemes[name].check(result.codes, result.params)
        own.install({name: result})
    off = sum(
        float((run(own, b) - t).square().sum()) for b, t in zip(batches, targets, strict=True)
    )
    return rounded, own.notes["distill"]["loss"], off


@pytest.mark.parametrize("loss", ["cosine", "mse"])
def test_the_loss_falls_and_so_does_the_error_of_the_block(
    block: tuple[Block, list], loss: str
) -> None:
    _, curve, error = distilled(block, loss=loss)
    _, _, before = distilled(block, epochs=0)
    assert min(curve) < curve[0]
    assert error < before


@pytest.mark.parametrize("start", ["rtn", "gptq"])
def test_no_errors_are_noted_of_codes_that_are_not_written(
    block: tuple[Block, list], start: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither those of a linear that GPTQ rounds to nearest, for it saw too few tokens."""
    monkeypatch.setattr(gptq_rounding, "saw_enough", lambda _, names, *__: "q_proj" not in names[0])
    own, batches = block
    Distill(**QUICK | {"start": start, "epochs": 1}).round(own, batches)
    assert own.notes.keys() == {"distill"}


@pytest.mark.parametrize(("decay", "last"), [(True, 0.0), (False, 1.0)])
def test_steps_decay_to_nothing_or_stay(
    block: tuple[Block, list], decay: bool, last: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.optim.Optimizer] = []
    monkeypatch.setattr(
        Distill, "optimizer", lambda *a, of=Distill.optimizer: made.append(of(*a)) or made[-1]
    )
    distilled(block, decay=decay, epochs=2)
    rates = [(group["lr"], group["initial_lr"]) for group in made[-1].param_groups]
    assert all(rate == pytest.approx(last * first) for rate, first in rates)


def test_a_block_that_writes_to_its_input_sees_it_whole_each_time(
    block: tuple[Block, list],
) -> None:
    distillation = Distillation(Distill(**QUICK), *block)

    def add(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        inputs[0].add_(1.0)

    distillation.student.module.register_forward_pre_hook(add)
    first, second = (distillation.loss(distillation.given(0)).item() for _ in range(2))
    assert first == second


def to_16_bits(block: Block, batches: list[Batch], dtype: torch.dtype) -> None:
    """Let ``block`` compute in ``dtype`` beside its exact weights, as on a GPU."""
    block.exact = {name: p.detach().clone() for name, p in block.module.named_parameters()}
    block.module.to(dtype)
    for batch in batches:
        batch.hidden = batch.hidden.to(dtype)
        kwargs = batch.kwargs[0]
        kwargs["position_embeddings"] = tuple(x.to(dtype) for x in kwargs["position_embeddings"])


@pytest.mark.parametrize("start", ["rtn", "gptq"])
def test_a_16_bit_module_learns_beside_the_exact_weights(
    block: tuple[Block, list], start: str
) -> None:
    own, batches = block
    expected, _, _ = distilled(block, start=start, epochs=0)
    to_16_bits(own, batches, torch.bfloat16)
    rounded, curve, _ = distilled(block, start=start)
    assert min(curve) < curve[0] or start == "gptq"
    same = (
        torch.cat([(rounded[n].codes == expected[n].codes).flatten() for n in expected])
        .float()
        .mean()
    )
    assert 0.5 < same <= 1


def test_learning_starts_from_the_exact_weights(block: tuple[Block, list]) -> None:
    """Not from the 16-bit copies that a module on a GPU computes with."""
    own, batches = copy.deepcopy(block)
    own.exact = {name: p.detach().clone() for name, p in own.module.named_parameters()}
    own.module.bfloat16()
    expected, found = (Distill().student(b, batches).module for b in (block[0], own))
    for name in own.schemes:
        assert torch.equal(found.get_submodule(name).weight, expected.get_submodule(name).weight)


def test_samples_may_all_learn(block: tuple[Block, list]) -> None:
    _, curve, _ = distilled(block, held_out=0.0)
    assert min(curve) < curve[0]
    assert curve != distilled(block)[1]
    with pytest.raises(QtoolError, match=r"held_out is 1.0; expected .* at most 0.5"):
        check_options(Distill, {"held_out": 1.0})


def test_a_bound_moves_by_a_width_at_most() -> None:
    with pytest.raises(QtoolError, match=r"scale_lr is 100; expected .* at most 1 "):
        check_options(Distill, {"scale_lr": 100})


def test_the_teacher_keeps_its_keys_and_values_whole(block: tuple[Block, list]) -> None:
    """So that the loss begins at what the cache costs, weights of 8 bits being next to nothing
    beside it.
    """
    own, batches = block
    own.schemes = dict.fromkeys(own.schemes, get("w8a8"))
    with quantized_kv(own, "kv4", kv_constants(own, "kv4", [])):
        whole, read = (
            [run(own, batch, **cache) for batch in batches] for cache in (own.full_kv, {})
        )
        Distill(**QUICK | {"epochs": 0}).round(own, batches)
    costs = [
        float((r - w).square().sum() / w.square().sum()) for r, w in zip(read, whole, strict=True)
    ]
    assert 0.8 * min(costs) < own.notes["distill"]["loss"][0] < 1.25 * max(costs)


def test_it_never_ends_worse_than_gptq(block: tuple[Block, list]) -> None:
    _, curve, _ = distilled(block, start="gptq")
    _, (before,), _ = distilled(block, start="gptq", epochs=0)
    assert min(curve) <= curve[0] == before


def test_no_epochs_give_the_codes_it_started_from(block: tuple[Block, list]) -> None:
    from qtool.calibration.rounding.rtn import RoundToNearest

    rounded, curve, _ = distilled(block, epochs=0)
    expected = RoundToNearest().round(*block)
    assert len(curve) == 1
    for name in expected:
        assert torch.equal(rounded[name].codes, expected[name].codes)
        assert all(
            torch.equal(rounded[name].params[key], t) for key, t in expected[name].params.items()
        )


def test_steps_that_lead_astray_are_not_kept(block: tuple[Block, list]) -> None:
    rounded, curve, _ = distilled(block, weight_lr=20.0, scale_lr=1.0)
    start, _, _ = distilled(block, epochs=0)
    assert min(curve) == curve[0]
    assert all(torch.equal(rounded[name].codes, start[name].codes) for name in start)


def test_a_seed_repeats_to_the_bit(block: tuple[Block, list]) -> None:
    first, curve, _ = distilled(block)
    again, same, _ = distilled(block)
    assert curve == same
    assert all(torch.equal(first[name].codes, again[name].codes) for name in first)
    assert distilled(block, seed=1)[1] != curve


@pytest.mark.parametrize(("size", "expected"), [(1, [1] * 5), (2, [2, 1, 2]), (8, [3, 2])])
def test_an_iteration_has_so_many_sequences(size: int, expected: list[int]) -> None:
    """Of an argument with several rows a sequence, as ALiBi's ``[B H, 1, S]``, too."""

    def batch(count: int) -> Batch:
        arguments = {"mask": torch.ones(count), "alibi": torch.arange(2 * count)}
        axes = {"mask": 0, "alibi": 0}
        return Batch(torch.randn(count, 4, 2), BlockArguments([arguments], [axes]))

    batches = [batch(3), batch(2)]
    found = [part for part in iterations(batches, size, 5) if part]
    assert [part.shape[0] for part in found] == expected
    assert all(len(part.kwargs[0]["mask"]) == part.shape[0] for part in found)
    alibi = torch.cat([part.kwargs[0]["alibi"] for part in found])
    assert torch.equal(alibi, torch.cat([torch.arange(6), torch.arange(4)]))
    hidden = [torch.cat([part.hidden for part in parts]) for parts in (found, batches)]
    assert torch.equal(*hidden)


def test_a_large_residual_stream_slows_no_learning(block: tuple[Block, list]) -> None:
    """The loss and its gradients are the smaller, and Adam steps as far."""
    own, batches = copy.deepcopy(block)
    for batch in batches:
        batch.hidden *= 1000
    _, (before, *after), _ = distilled((own, batches))
    assert before < 1e-6 and min(after) < 0.85 * before


def test_float16_holds_the_gradients(block: tuple[Block, list]) -> None:
    """The mean over all tokens and channels would be below it."""
    sizes: list[Tensor] = []
    step = torch.optim.Adam.step

    def seen(optimizer: torch.optim.Adam, *args: object) -> object:
        sizes.append(optimizer.param_groups[0]["params"][0].grad.abs().median())
        return step(optimizer, *args)

    with mock.patch.object(torch.optim.Adam, "step", seen):
        distilled(block)
    assert min(sizes) > torch.finfo(torch.float16).tiny


def test_a_gradient_beyond_float16_moves_nothing(block: tuple[Block, list]) -> None:
    own, batches = copy.deepcopy(block)
    to_16_bits(own, batches, torch.float16)
    learner = Distillation.learner

    def steep(self: Distillation, optimizer: torch.optim.Optimizer, scale: float) -> object:
        return learner(self, optimizer, 1e9 * scale)

    with mock.patch.object(Distillation, "learner", steep):
        rounded, curve, _ = distilled((own, batches))
    assert all(map(math.isfinite, curve))
    for name, one in rounded.items():
        own.schemes[name].check(one.codes, one.params)


def test_a_block_that_stays_in_16_bits_learns_nothing(block: tuple[Block, list]) -> None:
    own, batches = block
    assert Distill().round(replace(own, schemes={}), batches) == {}


def test_a_single_batch_is_enough(block: tuple[Block, list]) -> None:
    own, batches = block
    _, curve, _ = distilled((own, batches[:1]))
    assert len(curve) == 4


@pytest.mark.parametrize("name", SCHEMES)
def test_a_learned_linear_begins_with_the_given_codes(name: str) -> None:
    scheme, linear = get(name), nn.Linear(128, 16)
    params = scheme.fit(linear.weight, group_clip=0.7)
    codes = scheme.quantize(linear.weight, params)
    learned = LearnedLinear(linear, scheme, Rounded(codes, params), linear.weight)
    scheme.check(learned.rounded().codes, learned.rounded().params)
    assert torch.equal(learned.rounded().codes, codes)
    x = torch.randn(4, 128)
    expected = scheme.fake_activation(x, params) @ scheme.dequantize(codes, params).T + linear.bias
    torch.testing.assert_close(learned(x), expected)


def test_the_input_is_quantized_and_its_gradient_passes() -> None:
    scheme, linear = get("w4a8-lqq"), nn.Linear(128, 16, bias=False)
    params = scheme.fit(linear.weight)
    learned = LearnedLinear(
        linear, scheme, Rounded(scheme.quantize(linear.weight, params), params), linear.weight
    )
    x, direction = torch.randn(4, 128, requires_grad=True), torch.randn(4, 16)
    (learned(x) * direction).sum().backward()
    weight = scheme.dequantize(learned.rounded().codes, params)
    torch.testing.assert_close(x.grad, direction @ weight)
    assert not torch.allclose(learned(x), x @ weight.T, rtol=1e-6, atol=1e-6)


def test_nothing_but_the_linears_learns(block: tuple[Block, list]) -> None:
    student = Distill().student(*block).module
    learned = {n for n, m in student.named_modules() if isinstance(m, LearnedLinear)}
    assert len(learned) == 7
    assert {
        n.rpartition(".")[0] for n, p in student.named_parameters() if p.requires_grad
    } == learned


@pytest.mark.parametrize("name", ["w4a16", "w4a8-qoq", "w4a8-lqq"])
def test_the_gradient_of_the_scale_is_that_of_the_quantized_weight(name: str) -> None:
    """Where no code changes, the derivative by the scale is exact up to the rounding that STE
    ignores.
    """
    scheme, linear = get(name), nn.Linear(128, 8, bias=False)
    params = scheme.fit(linear.weight, group_clip=0.5)
    learned = LearnedLinear(
        linear, scheme, Rounded(scheme.quantize(linear.weight, params), params), linear.weight
    )
    with torch.no_grad():  # far outside: every code is clamped, V is proportional to the scale
        learned.steps.copy_(torch.randint_like(learned.steps, 2) * 2000 - 1000)
    direction = torch.randn(8, 128)

    def output() -> Tensor:
        return learned(torch.eye(128)).T.mul(direction).sum()

    output().backward()
    with torch.no_grad():
        before = output()
        learned.log_ratio += 1e-3
        change = (output() - before) / 1e-3
    torch.testing.assert_close(learned.log_ratio.grad.sum(), change, rtol=1e-2, atol=1e-2)
    assert not learned.steps.grad.any()


@pytest.mark.parametrize("name", WITH_ENDS)
def test_the_gradient_reaches_both_bounds(name: str) -> None:
    """By the closed form: a clamped weight moves with its bound, one between the bounds with their
    distance.
    """
    scheme, linear = get(name), nn.Linear(256, 8, bias=False)
    params = scheme.fit(linear.weight, group_clip=0.8)
    learned = LearnedLinear(
        linear, scheme, Rounded(scheme.quantize(linear.weight, params), params), linear.weight
    )
    with torch.no_grad():
        learned.steps.mul_(1.5)
    direction = torch.randn(8, 256)
    learned(torch.eye(256)).T.mul(direction).sum().backward()

    grid, weight = scheme.grid(params), learned.weight.detach()
    value, low, high = (
        t.double()
        for t in (grid.value(grid.nearest(weight)), grid.offset, grid.offset + 15 * grid.step)
    )
    low, width = low[..., None], (high - low)[..., None]
    below = weight < value - grid.step[..., None] / 2
    above = weight > value + grid.step[..., None] / 2
    assert below.any() and above.any() and not (below | above).all()
    inside = ~(below | above)
    to_high = torch.where(inside, value - weight, value - low) / width  # of V by the upper bound
    to_low = torch.where(inside, weight - value, low + width - value) / width
    along = scheme.groups(direction)
    expected = torch.stack([(along * to * width).sum(-1) for to in (to_low, to_high)])
    torch.testing.assert_close(
        learned.shift.grad.double(), expected, rtol=1e-3, atol=1e-3 * float(expected.std())
    )
    both = ((along * (to_low * low + to_high * (low + width))).sum(-1)).view(8, -1).sum(1)
    torch.testing.assert_close(
        learned.log_ratio.grad.double(), both, rtol=1e-3, atol=1e-3 * float(both.std())
    )


@pytest.mark.parametrize("start", ["rtn", "gptq"])
@pytest.mark.parametrize("name", WITH_ENDS)
def test_zero_points_are_learned_and_never_for_the_worse(
    name: str, start: str, block: tuple[Block, list]
) -> None:
    own, batches = block
    scheme = get(name, get(name).group_sizes[0])
    own.schemes = dict.fromkeys(own.schemes, scheme)
    for linear in own.schemes:
        own.weight(linear).sub_(0.02)  # one bound is farther than the other
    expected, (before,), _ = distilled((own, batches), start=start, epochs=0)
    found, curve, _ = distilled(
        (own, batches), start=start, epochs=8, weight_lr=0.02, scale_lr=1e-2
    )
    assert min(curve) <= curve[0] == before
    (integer,) = {"zero", "offset"} & set(expected["mlp.up_proj"].params)
    assert min(curve) == before or any(
        not torch.equal(found[linear].params[integer], expected[linear].params[integer])
        for linear in found
    )
    assert start == "gptq" or min(curve) < before


@pytest.mark.parametrize(("option", "value"), [("start", "rtm"), ("loss", "cosin")])
def test_unknown_choices_are_refused_with_a_suggestion(option: str, value: str) -> None:
    with pytest.raises(QtoolError, match="did you mean"):
        Distill(**{option: value})


def test_what_was_pruned_does_not_learn() -> None:
    scheme, linear = get("w4a16-24", 128), nn.Linear(128, 8, bias=False)
    params = scheme.fit(linear.weight.detach())
    start = Rounded(scheme.quantize(linear.weight.detach(), params), params)
    learned = LearnedLinear(linear, scheme, start, linear.weight)
    learned(torch.randn(16, 128)).square().sum().backward()
    assert learned.keep is not None and learned.steps.grad is not None
    assert learned.steps.grad[learned.keep].any() and not learned.steps.grad[~learned.keep].any()


def test_outlier_channels_learn_by_steps_of_their_own() -> None:
    """A rate that is a twentieth of a step moves no weight by more, whatever others' steps are."""
    torch.manual_seed(0)
    scheme, linear = get("w4a16", 32), nn.Linear(64, 8, bias=False)
    linear.weight.data[:, 32:] *= 100
    params = scheme.fit(linear.weight.detach())
    start = Rounded(scheme.quantize(linear.weight.detach(), params), params)
    learned = LearnedLinear(linear, scheme, start, linear.weight)
    before, step = learned.weight.detach().clone(), scheme.grid(params).step[..., None]
    optimizer = Distill(weight_lr=0.05).optimizer({"linear": learned})
    learned(torch.randn(16, 64)).square().sum().backward()
    optimizer.step()
    moved = (learned.weight.detach() - before).abs() / step
    torch.testing.assert_close(moved, torch.full_like(moved, 0.05), rtol=1e-2, atol=1e-3)


def test_a_learned_linear_gathers_its_input() -> None:
    scheme, linear = get("w8a8"), nn.Linear(64, 8, bias=False)
    params = scheme.fit(linear.weight.detach())
    start = Rounded(scheme.quantize(linear.weight.detach(), params), params)
    order, x = torch.randperm(64, generator=torch.Generator().manual_seed(0)), torch.randn(5, 64)
    gathered = LearnedLinear(linear, scheme, start, linear.weight, order)(x)
    assert torch.equal(gathered, LearnedLinear(linear, scheme, start, linear.weight)(x[:, order]))


def test_the_teacher_takes_the_float_models_path_where_that_runs(
    block: tuple[Block, list],
) -> None:
    """The first loss counts what the input lacks too, and learning makes up for some of it."""
    own, batches = block
    floats = {id(batch): copy.deepcopy(batch) for batch in batches}
    for batch in batches:
        batch.hidden += 0.1 * torch.randn(batch.hidden.shape)
    losses = []
    for reference in (None, Reference.of(own, floats)):
        one = replace(copy.deepcopy(own), reference=reference)
        Distill(**QUICK).round(one, batches)
        losses.append(one.notes["distill"]["loss"])
    alone, beside = losses
    assert beside[0] > 2 * alone[0] and min(beside) < beside[0]
