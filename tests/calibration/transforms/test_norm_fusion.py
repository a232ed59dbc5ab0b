from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qtool.calibration.block import Block
from qtool.calibration.transforms.norm_fusion import NormFusion, fuse
from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.models.family import Family
from qtool.models.parts import Attention


def test_logits_stay_and_norms_are_plain(any_model, transformed, logits):
    fused = transformed(any_model, [NormFusion()])
    torch.testing.assert_close(logits(fused), logits(any_model), rtol=1e-4, atol=1e-4)
    family = family_of(any_model.config)
    for layer in fused.get_submodule(family.blocks):
        for norm in {
            group.source for group in family.at(any_model.config, 0).groups if group.reads_residual
        }:
            assert layer.get_submodule(norm).weight.eq(1 - family.norm_offset).all()
    final = fused.get_submodule(family.final_norm).weight
    if family.post_norms:  # nothing will rotate behind it
        assert torch.equal(final, any_model.get_submodule(family.final_norm).weight)
    else:
        assert final.eq(1 - family.norm_offset).all()


def layer_norm_block(bias: bool) -> Block:
    module = nn.ModuleDict({"norm": nn.LayerNorm(16), "fc": nn.Linear(16, 8, bias=bias)})
    nn.init.uniform_(module["norm"].weight, 0.5, 2.0)
    nn.init.normal_(module["norm"].bias)
    family = Family("toy", ("toy",), (), Attention(), tensors={})
    return Block(0, module, family, SimpleNamespace(), {})


@torch.no_grad()
def test_a_layer_norms_bias_goes_into_the_reader():
    block, x = layer_norm_block(bias=True), torch.randn(5, 16)
    before = block.get("fc")(block.get("norm")(x))
    fuse(block, "norm", ["fc"])
    assert block.bias("norm").eq(0).all()
    torch.testing.assert_close(block.get("fc")(block.get("norm")(x)), before)


@torch.no_grad()
def test_a_bias_that_no_reader_can_take_stays_in_the_norm():
    block, x = layer_norm_block(bias=False), torch.randn(5, 16)
    before = block.get("fc")(block.get("norm")(x))
    fuse(block, "norm", ["fc"])
    assert block.weight("norm").eq(1).all() and block.bias("norm").ne(0).all()
    torch.testing.assert_close(block.get("fc")(block.get("norm")(x)), before)


@torch.no_grad()
@pytest.mark.parametrize("gain", [0.0, 1e-6])
def test_a_bias_of_a_channel_without_weight_is_refused(gain: float) -> None:
    """Divided by 1e-6 it is so large that bfloat16 rounds all other channels away when rotated."""
    block = layer_norm_block(bias=False)
    block.weight("norm")[3], block.bias("norm")[3] = gain, 0.5
    with pytest.raises(
        QtoolError, match=r"norm of block 0 has channels with a bias .* RMS of (inf|1\.25e\+05)"
    ):
        fuse(block, "norm", ["fc"])


@torch.no_grad()
def test_a_channel_with_neither_weight_nor_bias() -> None:
    block = layer_norm_block(bias=False)
    block.weight("norm")[3] = block.bias("norm")[3] = 0
    fuse(block, "norm", ["fc"])
    assert block.bias("norm").isfinite().all() and block.weight("fc")[:, 3].eq(0).all()
