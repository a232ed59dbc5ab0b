from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qtool.calibration.block import Block
from qtool.calibration.norm_fusion import NormFusion, fuse
from qtool.errors import QtoolError


def test_logits_stay_and_norms_are_plain(any_model, transformed, logits):
    fused = transformed(any_model, [NormFusion()])
    torch.testing.assert_close(logits(fused), logits(any_model), rtol=1e-4, atol=1e-4)
    for layer in fused.model.layers:
        assert layer.input_layernorm.weight.eq(1).all() and layer.post_attention_layernorm.weight.eq(1).all()
    assert fused.model.norm.weight.eq(1).all()


def layer_norm_block(bias: bool) -> Block:
    module = nn.ModuleDict({"norm": nn.LayerNorm(16), "fc": nn.Linear(16, 8, bias=bias)})
    nn.init.normal_(module["norm"].weight)
    nn.init.normal_(module["norm"].bias)
    return Block(0, module, None, SimpleNamespace(), {})


@torch.no_grad()
def test_a_layer_norms_bias_goes_into_the_reader():
    block, x = layer_norm_block(bias=True), torch.randn(5, 16)
    before = block.get("fc")(block.get("norm")(x))
    fuse(block, "norm", ["fc"])
    assert block.bias("norm").eq(0).all()
    torch.testing.assert_close(block.get("fc")(block.get("norm")(x)), before)


def test_a_reader_without_bias_cannot_take_one():
    with pytest.raises(QtoolError, match="norm has a bias but fc"):
        fuse(layer_norm_block(bias=False), "norm", ["fc"])
