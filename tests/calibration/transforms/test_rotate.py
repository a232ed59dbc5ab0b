from types import SimpleNamespace

import pytest
import torch
from torch import nn

from qtool.calibration.block import Block
from qtool.calibration.forwards import observe
from qtool.calibration.method import check_order
from qtool.calibration.transforms.norm_fusion import NormFusion
from qtool.calibration.transforms.rotate import Rotate
from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.models.family import Family
from qtool.models.parts import Attention, Fold, LinearGroup


@pytest.mark.parametrize(
    "options",
    (
        {},
        {"heads": False},
        {"residual": False},
        {"seed": 5, "keeps_mean": True},
        {"residual": False, "learn_steps": 5},
    ),
)
def test_logits_stay(any_model, transformed, logits, options):
    family = family_of(any_model.config)
    if family.post_norms and options.get("residual", True):
        with pytest.raises(QtoolError, match="acts on what is written to it"):
            Rotate(**options).prepare(family, any_model.config)
        return
    rotated = transformed(any_model, [NormFusion(), Rotate(**options)])
    torch.testing.assert_close(logits(rotated), logits(any_model), rtol=1e-3, atol=2e-3)


def test_outliers_of_every_rotated_input_vanish(llama, transformed, with_outliers, blocks):
    def kurtosis(model):
        worst = {}
        for block, batches in blocks(model):
            for name in ("self_attn.q_proj", "mlp.gate_proj", "self_attn.o_proj"):
                seen = []
                observe(block, batches, {name: seen.append})
                x = torch.cat(seen)
                worst[name] = max(
                    worst.get(name, 0), float(x.abs().amax() / x.square().mean().sqrt())
                )
        return worst

    outliers = with_outliers(llama)
    before, after = kurtosis(outliers), kurtosis(transformed(outliers, [NormFusion(), Rotate()]))
    assert all(after[name] < before[name] * 0.75 for name in before), (before, after)


def test_a_loud_value_channel_drowns_no_other(llama, transformed, with_outliers):
    def inputs_of_o(model):
        rotated = transformed(model, [NormFusion(), Rotate()])
        return [layer.self_attn.v_proj.weight for layer in rotated.model.layers]

    for clean, loud in zip(inputs_of_o(llama), inputs_of_o(with_outliers(llama)), strict=True):
        torch.testing.assert_close(loud, clean, rtol=1e-3, atol=1e-4)


def test_the_seed_decides(llama, transformed):
    def weight(seed):
        return (
            transformed(llama, [NormFusion(), Rotate(seed=seed)]).model.layers[0].mlp.up_proj.weight
        )

    assert torch.equal(weight(1), weight(1)) and not torch.equal(weight(1), weight(2))


def test_unfused_norms_are_refused(llama, blocks):
    block, batches = blocks(llama)[0]
    with pytest.raises(QtoolError, match="norm-fusion must come first"):
        Rotate().apply(block, batches)
    with pytest.raises(QtoolError, match="rotate needs norm-fusion before it"):
        check_order([Rotate()])


class LayerNormBlock(nn.Module):
    """``x + fc2(relu(fc1(LayerNorm(x))))``, as in OPT."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 40),
            nn.Linear(40, hidden),
        )
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        return x + self.fc2(self.fc1(self.norm(x)).relu())


@torch.no_grad()
def test_layer_norm_models_keep_their_layer_norm():
    groups = (
        LinearGroup(("fc1",), "norm", Fold.NORM),
        LinearGroup(("fc2",), "fc1", Fold.NONE, writes_residual=True),
    )
    family = Family("toy", ("toy",), groups, Attention(), tensors={})
    module, x = LayerNormBlock(96), torch.randn(3, 7, 96) + 1
    block = Block(0, module, family, SimpleNamespace(hidden_size=96), {})
    before = module(x)
    NormFusion().apply(block, [])
    with pytest.raises(QtoolError, match="keeps_mean"):
        Rotate(heads=False).apply(block, [])
    rotate = Rotate(heads=False, keeps_mean=True)
    rotate.apply(block, [])
    torch.testing.assert_close(
        module(rotate.embedding(x)), rotate.embedding(before), rtol=1e-4, atol=1e-4
    )
