import pytest
import torch

from qtool.calibration.forwards import run
from qtool.calibration.method import check_order
from qtool.calibration.transforms import value_basis
from qtool.calibration.transforms.norm_fusion import NormFusion
from qtool.calibration.transforms.reorder import Reorder
from qtool.calibration.transforms.rotate import Rotate
from qtool.calibration.transforms.smooth import Smooth
from qtool.calibration.transforms.value_basis import (
    ValueBasis,
    fit,
    fold,
    output_error,
    output_metric,
    predicted_error,
)
from qtool.errors import QtoolError


def test_logits_stay(any_model, transformed, logits):
    turned = transformed(any_model, [ValueBasis(steps=5)])
    torch.testing.assert_close(logits(turned), logits(any_model), rtol=1e-3, atol=2e-3)


def test_any_basis_may_stand_between_v_and_o(any_model, blocks):
    block, batches = blocks(any_model)[0]
    before, heads = run(block, batches[0]), block.heads
    value = block.weight(block.family.attention.v).clone()
    fold(block, torch.randn(heads.kv, heads.dim, heads.dim, dtype=torch.float64))
    assert not torch.allclose(block.weight(block.family.attention.v), value, rtol=0.1)
    torch.testing.assert_close(run(block, batches[0]), before, rtol=1e-2, atol=1e-2)
    with pytest.raises(QtoolError, match="has no inverse"):
        fold(block, torch.zeros(heads.kv, heads.dim, heads.dim, dtype=torch.float64))


def test_the_metric_is_what_o_makes_of_an_error(llama, blocks):
    block, _ = blocks(llama)[0]
    heads = block.heads
    weight, lost = block.weight("self_attn.o_proj"), torch.randn(heads.kv, heads.dim)
    group = heads.query // heads.kv
    each = [
        lost[h // group] @ weight[:, h * heads.dim : (h + 1) * heads.dim].T
        for h in range(heads.query)
    ]
    found = ((lost[:, None] @ output_metric(block)) @ lost[..., None]).flatten()
    expected = torch.stack(each).square().sum(1).view(heads.kv, group).sum(1)
    scale = weight.square().sum(0).view(heads.kv, group, heads.dim).sum(1).mean(1)
    torch.testing.assert_close(found * scale, expected, rtol=1e-4, atol=1e-4)


def corners(tokens: int = 3000, dim: int = 16) -> torch.Tensor:
    """Values that a hidden basis has at the corners of a cube, mixed: seen anywhere else they have
    extremes.
    """
    random = torch.Generator().manual_seed(0)
    hidden = (torch.rand(2, tokens, dim, generator=random) < 0.5).float() * 2 - 1
    return hidden @ torch.randn(2, dim, dim, generator=random)


def test_the_fit_finds_a_basis_without_extremes_and_4_bits_lose_less():
    values, cost = corners(), torch.eye(16).expand(2, 16, 16)
    unit = torch.eye(16).expand(2, 16, 16)
    found = fit(values, cost, 200, 0.1)
    assert (predicted_error(found, values, cost) < 0.5 * predicted_error(unit, values, cost)).all()
    assert (output_error(values, found, cost) < 0.6 * output_error(values, unit, cost)).all()


def test_an_error_counts_where_o_reads_it():
    values, cost = corners(), torch.diag(torch.tensor([1.0] + [0.0] * 15)).expand(2, 16, 16)
    unit = torch.eye(16).expand(2, 16, 16)
    only_one = (values[..., 0] - values[..., 0].mean()).abs().mean()
    assert (output_error(values, unit, cost) < only_one**2).all()
    assert (
        output_error(values, fit(values, cost, 100, 0.1), cost) < output_error(values, unit, cost)
    ).all()


def test_a_head_that_gains_nothing_is_left_alone(llama, blocks):
    block, batches = blocks(llama)[0]
    before = block.weight("self_attn.v_proj").clone()
    ValueBasis(steps=1, step_size=0.0).apply(block, batches)
    unchanged = (block.weight("self_attn.v_proj") == before).view(block.heads.kv, -1).all(1)
    note = block.notes["value-basis"]
    assert note["error"] <= note["error_unsmoothed"]
    assert unchanged.all() == (note["error"] == note["error_unsmoothed"])


def test_four_bit_values_lose_less_at_os_output(llama, blocks):
    block, batches = blocks(llama)[0]
    ValueBasis(steps=100).apply(block, batches)
    note = block.notes["value-basis"]
    assert note["error"] < note["error_unsmoothed"]


def test_it_repeats_and_impossible_orders_are_refused(llama, transformed):
    def weight():
        return transformed(llama, [ValueBasis(steps=5)]).model.layers[1].self_attn.v_proj.weight

    assert torch.equal(weight(), weight())
    check_order([NormFusion(), Rotate(), Smooth(), ValueBasis(), Reorder()])
    for early, late in (
        (ValueBasis(), Rotate()),
        (ValueBasis(), Smooth()),
        (Reorder(), ValueBasis()),
    ):
        with pytest.raises(QtoolError, match="must come before"):
            check_order([NormFusion(), early, late])


def test_a_basis_that_loses_is_not_taken(llama, blocks, monkeypatch):
    block, batches = blocks(llama)[0]
    before, dim = block.weight("self_attn.v_proj").clone(), block.heads.dim
    loud = torch.diag(torch.logspace(-3, 3, dim)).expand(
        block.heads.kv, dim, dim
    )  # one channel drowns the others
    monkeypatch.setattr(value_basis, "fit", lambda *_: loud)
    ValueBasis().apply(block, batches)
    assert torch.equal(block.weight("self_attn.v_proj"), before)
    assert block.notes["value-basis"]["error"] == block.notes["value-basis"]["error_unsmoothed"]
