import pytest
import torch

from qtool.calibration.statistics import collect
from qtool.calibration.transforms.norm_fusion import NormFusion
from qtool.calibration.transforms.shift import shift_norms, shifted
from qtool.calibration.transforms.smooth import Smooth
from qtool.models import family_of
from tests.calibration.conftest import CONFIGS, make_model

#: models whose norms and linears have biases
BIASED = ("opt", "falcon-rw")


@pytest.mark.parametrize("name", CONFIGS)
def test_norms_and_linears_with_biases_are_found(name):
    config = CONFIGS[name]
    family = family_of(config).at(config, 0)
    groups = shifted(family, family.block_shapes(config))
    assert len(groups) == (2 if name in BIASED else 0)


@pytest.mark.parametrize("fused", [True, False])
def test_logits_stay(any_model, transformed, logits, fused):
    transforms = [*[NormFusion()] * fused, Smooth(groups=[], shift=True)]
    shifted_model = transformed(any_model, transforms)
    torch.testing.assert_close(logits(shifted_model), logits(any_model), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", BIASED)
def test_what_norms_return_has_no_mean(name, blocks):
    for block, batches in blocks(make_model(CONFIGS[name])):
        firsts = [group.linears[0] for group in shifted(block.family, block.parameters())]

        def means(block=block, batches=batches, firsts=firsts):
            inputs = collect(block, batches, firsts, tokens=64)
            return torch.stack([inputs[first].sample.mean(0) for first in firsts])

        before = means()
        Smooth(groups=[], shift=True).apply(block, batches)
        assert (means().abs() <= before.abs() / 256 + 1e-5).all()  # by the rounding to bfloat16
        assert before.abs().mean() > 0.1


def test_other_models_are_not_even_run(llama, blocks):
    block, _ = blocks(llama)[0]
    before = {name: tensor.clone() for name, tensor in block.parameters().items()}
    shift_norms(block, [], seed=0)
    for name, tensor in block.parameters().items():
        assert torch.equal(tensor, before[name])
