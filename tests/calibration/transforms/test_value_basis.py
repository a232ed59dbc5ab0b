import pytest
import torch

from qtool.calibration.method import check_order
from qtool.calibration.transforms import value_basis
from qtool.calibration.transforms.learned_rotation import learn, unit_rows
from qtool.calibration.transforms.norm_fusion import NormFusion
from qtool.calibration.transforms.reorder import Reorder
from qtool.calibration.transforms.rotate import Rotate
from qtool.calibration.transforms.smooth import Smooth
from qtool.calibration.transforms.value_basis import ValueBasis
from qtool.errors import QtoolError


def test_logits_stay(any_model, transformed, logits):
    turned = transformed(any_model, [ValueBasis(steps=5)])
    torch.testing.assert_close(logits(turned), logits(any_model), rtol=1e-3, atol=2e-3)


def test_four_bit_values_lose_less_and_o_is_no_harder_to_round(llama, blocks):
    block, batches = blocks(llama)[0]

    def maxima():
        groups = unit_rows(block.weight("self_attn.o_proj")).unflatten(1, (-1, block.heads.dim))
        return float(groups.float().abs().amax(-1).square().mean())

    before = maxima()
    ValueBasis().apply(block, batches)
    note = block.notes["value-basis"]
    assert note["error"] < 0.9 * note["error_unsmoothed"]
    assert maxima() < 0.9 * before


def test_it_is_learned_from_values_as_the_cache_gets_them(llama, blocks, monkeypatch):
    block, batches = blocks(llama)[0]
    seen, given = [], []
    v = block.get("self_attn.v_proj")
    weight, bias = v.weight.detach().clone(), block.bias("self_attn.v_proj")
    bias = None if bias is None else bias.clone()
    v.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))

    def spy(*arguments):
        given.append(arguments)
        return learn(*arguments)

    monkeypatch.setattr(value_basis, "learn", spy)
    ValueBasis(steps=1).apply(block, batches)
    [([rows], start, steps, [values])] = given
    assert steps == 1 and len(start) == block.heads.kv
    assert values.group == block.heads.dim and values.ranges  # as a cache of 4 bits has them
    scheme, weight_of_o = block.schemes["self_attn.o_proj"], block.weight("self_attn.o_proj")
    assert rows.values.shape == weight_of_o.shape
    assert rows.group == scheme.groups(weight_of_o).shape[2]
    every = torch.nn.functional.linear(torch.cat(seen), weight, bias)
    whole = every / every.square().mean().sqrt()
    found = torch.cdist(values.values.float(), whole).amin(1)
    assert (found < 1e-2 * whole.norm(dim=1).mean()).all()


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
