import copy

import pytest
import torch

from qtool.calibration.forwards import inputs_of, run
from qtool.calibration.method import check_order
from qtool.calibration.reference import Reference
from qtool.calibration.rounding.distill.distill import Distill
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.calibration.statistics import collect
from qtool.calibration.transforms.clip import Clip
from qtool.calibration.transforms.online_hadamard import OnlineHadamard
from qtool.calibration.transforms.reorder import recipe_group
from qtool.calibration.transforms.smooth import Smooth
from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.schemes import get
from qtool.schemes.arithmetic.online_hadamard import rotate
from tests.calibration.conftest import CONFIGS, make_model

DOWN = "mlp.down_proj"


def prepared(model):
    transform = OnlineHadamard()
    transform.prepare(family_of(model.config), model.config)
    return transform


def test_logits_stay(any_wide_model, transformed, logits):
    rotated = transformed(any_wide_model, [OnlineHadamard()])
    torch.testing.assert_close(logits(rotated), logits(any_wide_model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size, chosen", [(192, (DOWN,)), (160, ())])
def test_channels_that_64_does_not_divide_stay(llama, size, chosen):
    llama.config.intermediate_size = size
    assert prepared(llama).rotates(family_of({"model_type": "llama"})) == chosen


def test_every_down_projection_is_rotated_but_those_that_read_a_relu(any_wide_model):
    config = any_wide_model.config
    family = family_of(config).at(config, 0)
    downs = {n for g in family.groups if recipe_group(g) == "product" for n in g.linears}
    of_relu = getattr(config, "activation_function", "") == "relu"
    assert set(prepared(any_wide_model).rotates(family)) == (set() if of_relu else downs)


@pytest.mark.parametrize("size", [96, 128])
def test_experts_of_channels_that_64_does_not_divide_stay(size):
    model = make_model(CONFIGS["qwen3-moe"])
    model.config.moe_intermediate_size = size
    mixture, dense = (
        family_of({"model_type": "qwen3_moe"}).at(model.config, block) for block in (0, 1)
    )
    experts = tuple(f"mlp.experts.{e}.down_proj" for e in range(4)) if size == 128 else ()
    assert prepared(model).rotates(mixture) == experts
    assert prepared(model).rotates(dense) == (DOWN,)


@pytest.mark.parametrize("some", [1, 4])
def test_what_experts_read_is_rotated_wherever_it_is_observed(some, blocks):
    """Of all at once and of each alone, and where other experts stay in 16 bits."""
    block, batches = blocks(make_model(CONFIGS["mixtral"]), get("w8a8"))[0]
    names = [f"block_sparse_moe.experts.{e}.w2" for e in range(4)]
    before = [inputs_of(block, batches[0], name)[0] for name in names]
    output, weights = run(block, batches[0]), [block.weight(name).clone() for name in names]
    for name in names[some:]:
        del block.schemes[name]
    prepared(make_model(CONFIGS["mixtral"])).apply(block, batches)
    assert block.rotated == set(names[:some])
    expected = [rotate(x) for x in before[:some]] + before[some:]
    seen = collect(block, batches[:1], names, tokens=32)
    moments = Gptq().moments_of_experts(block, batches[:1], [[name] for name in names[:some]])
    for name, x, weight in zip(names, expected, weights, strict=True):
        torch.testing.assert_close(inputs_of(block, batches[0], name)[0], x, rtol=1e-4, atol=1e-4)
        if name in seen:  # the others saw few tokens
            torch.testing.assert_close(seen[name].amax, x.abs().amax(0), rtol=1e-4, atol=1e-4)
        if name in block.rotated:
            assert torch.equal(block.weight(name), rotate(weight))
            exact = x.double().T @ x.double()
            h = moments[name].h.double()
            assert (h / h.trace() - exact / exact.trace()).norm() < 0.02 * h.norm() / h.trace()
    assert names[0] in seen
    torch.testing.assert_close(run(block, batches[0]), output, rtol=1e-4, atol=1e-4)


def test_inputs_and_columns_are_rotated_alike(llama, blocks):
    block, batches = blocks(llama)[0]
    (before,), weight = inputs_of(block, batches[0], DOWN), block.weight(DOWN).clone()
    prepared(llama).apply(block, batches)
    (after,) = inputs_of(block, batches[0], DOWN)
    torch.testing.assert_close(after, rotate(before), rtol=1e-5, atol=1e-5)
    assert torch.equal(block.weight(DOWN), rotate(weight)) and block.rotated == {DOWN}


def test_what_stays_in_16_bits_is_not_rotated(llama, blocks):
    block, batches = blocks(llama)[0]
    del block.schemes[DOWN]
    prepared(llama).apply(block, batches)
    assert not block.rotated


@pytest.mark.parametrize("name", ["llama-gqa-biases", "mixtral"])
@pytest.mark.parametrize("rounding", [RoundToNearest(), Gptq(), Distill(epochs=1)])
def test_a_rounded_linear_rotates(name, blocks, rounding):
    model = make_model(CONFIGS[name])
    block, batches = blocks(model, get("w8a8"))[0]
    exact = run(block, batches[0])
    prepared(model).apply(block, batches)
    assert block.rotated
    with torch.no_grad():
        expected = run(block, batches[0])
    torch.testing.assert_close(expected, exact, rtol=1e-4, atol=1e-4)
    block.reference = Reference.of(block)
    found = rounding.round(block, batches)
    block.install({name: one for name, one in found.items() if isinstance(one, Rounded)})
    least = 0.1 if name == "mixtral" else 0.05  # a token may go to other experts
    assert (run(block, batches[0]) - exact).norm() < least * exact.norm()


def test_it_comes_after_what_folds_in_the_channels_before():
    with pytest.raises(QtoolError, match="smooth must come before online-hadamard"):
        check_order([OnlineHadamard(), Smooth()])
    with pytest.raises(QtoolError, match="online-hadamard must come before clip"):
        check_order([Clip(), OnlineHadamard()])
    check_order([Smooth(), OnlineHadamard(), Clip()])


def test_inputs_are_gathered_before_and_rotated_once(llama, blocks):
    """The only order that a checkpoint can say."""
    block, batches = blocks(llama)[0]
    before, order = run(block, batches[0]), torch.randperm(block.weight(DOWN).shape[1])
    block.permute(DOWN, order)
    block.rotate_inputs(DOWN)
    torch.testing.assert_close(run(block, batches[0]), before, rtol=1e-4, atol=1e-4)
    with pytest.raises(QtoolError, match=f"{DOWN}: its inputs are rotated already; gathering"):
        block.permute(DOWN, order)
    with pytest.raises(QtoolError, match=f"{DOWN}: its inputs are rotated already; once"):
        block.rotate_inputs(DOWN)


def test_a_copy_of_a_block_rotates_too(llama, blocks):
    block, batches = blocks(llama)[0]
    prepared(llama).apply(block, batches)
    reference = Reference.of(block)
    (own,), (theirs,) = inputs_of(block, batches[0], DOWN), reference.inputs(batches[0], DOWN)
    assert torch.equal(own, theirs)
    again = copy.deepcopy(block)
    assert torch.equal(run(again, batches[0]), run(block, batches[0]))
