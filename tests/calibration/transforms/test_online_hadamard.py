import copy

import pytest
import torch

from qtool.calibration.forwards import Reference, inputs_of, run
from qtool.calibration.method import check_order
from qtool.calibration.rounding.distill.distill import Distill
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.calibration.rounding.rounded import Rounded
from qtool.calibration.rounding.rtn import RoundToNearest
from qtool.calibration.transforms.clip import Clip
from qtool.calibration.transforms.online_hadamard import OnlineHadamard
from qtool.calibration.transforms.smooth import Smooth
from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.schemes import get
from qtool.schemes.arithmetic.online_hadamard import rotate

DOWN = "mlp.down_proj"


def prepared(model):
    transform = OnlineHadamard()
    transform.prepare(family_of(model.config.model_type), model.config)
    return transform


def test_logits_stay(any_wide_model, transformed, logits):
    rotated = transformed(any_wide_model, [OnlineHadamard()])
    torch.testing.assert_close(logits(rotated), logits(any_wide_model), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size, chosen", [(192, (DOWN,)), (160, ())])
def test_channels_that_64_does_not_divide_stay(llama, size, chosen):
    llama.config.intermediate_size = size
    assert prepared(llama).rotates(family_of("llama")) == chosen


def test_routed_experts_stay(any_wide_model):
    family = family_of(any_wide_model.config.model_type)
    names = prepared(any_wide_model).rotates(family.at(any_wide_model.config, 0))
    assert not any(".experts." in name for name in names)


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


@pytest.mark.parametrize("rounding", [RoundToNearest(), Gptq(), Distill(epochs=1)])
def test_a_rounded_linear_rotates(llama, blocks, rounding):
    block, batches = blocks(llama, get("w8a8"))[0]
    exact = run(block, batches[0])
    prepared(llama).apply(block, batches)
    with torch.no_grad():
        expected = run(block, batches[0])
    torch.testing.assert_close(expected, exact, rtol=1e-4, atol=1e-4)
    block.reference = Reference.of(block)
    found = rounding.round(block, batches)
    block.install({name: one for name, one in found.items() if isinstance(one, Rounded)})
    assert (run(block, batches[0]) - exact).norm() < 0.05 * exact.norm()


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
