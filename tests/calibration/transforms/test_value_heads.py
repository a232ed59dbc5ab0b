"""The rotation of the value heads: each kv head's own, from o's columns and its 4-bit inputs."""

import copy

import pytest
import torch
from torch import Tensor

from qtool import recipes
from qtool.calibration.forwards import run
from qtool.calibration.transforms import value_heads
from qtool.calibration.transforms.hadamard import Hadamard
from qtool.calibration.transforms.learned_rotation import learn, unit_rows
from qtool.calibration.transforms.norm_fusion import NormFusion
from qtool.calibration.transforms.rotate import Rotate
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.planning.work import block_shape
from qtool.schemes import get

GROUP = 32


def maxima(weight: Tensor) -> float:
    """The mean square of the groups' largest values, of rows of one size."""
    return float(
        unit_rows(weight.detach()).unflatten(1, (-1, GROUP)).abs().amax(-1).square().mean()
    )


def test_each_kv_head_has_an_orthogonal_matrix_of_its_own(llama, blocks):
    block, batches = blocks(llama)[0]
    found, heads = value_heads.rotation_of(block, batches, 5), block.heads
    assert isinstance(found, value_heads.OfHeads)
    assert found.matrix.shape == (heads.kv, heads.dim, heads.dim)
    eye = torch.eye(heads.dim, dtype=torch.float64).expand_as(found.matrix)
    torch.testing.assert_close(found.matrix @ found.matrix.mT, eye)
    assert not torch.allclose(found.matrix[0], found.matrix[1], atol=0.01)
    x = torch.randn(3, heads.query, heads.dim)
    per_head = heads.query // heads.kv
    for head, turned in enumerate(found(x).unbind(1)):
        expected = x[:, head].double() @ found.matrix[head // per_head]
        torch.testing.assert_close(turned, expected.float())


def test_learning_lowers_the_maxima_of_o(llama, transformed):
    def of_o(steps):
        rotate = Rotate(residual=False, learn_steps=steps)
        layers = transformed(llama, [NormFusion(), rotate]).model.layers
        return sum(maxima(layer.self_attn.o_proj.weight) for layer in layers)

    assert of_o(100) < 0.85 * of_o(0)


@pytest.mark.parametrize(
    ("scheme", "size", "coarse"),
    [("w4a4", GROUP, True), ("w4a8-lqq", GROUP, False), ("w8a8", "default", True)],
)
def test_inputs_of_no_more_bits_are_among_the_rows(
    scheme, size, coarse, llama, blocks, monkeypatch
):
    block, batches = blocks(llama, get(scheme, size))[0]
    found = []

    def spy(*arguments):
        found.append(arguments)
        return learn(*arguments)

    monkeypatch.setattr(value_heads, "learn", spy)
    value_heads.rotation_of(block, batches, 1)
    [([rows], _, _, inputs)] = found
    assert rows.ranges == (scheme == "w4a8-lqq") and not any(part.ranges for part in inputs)
    weight = block.weight("self_attn.o_proj")
    group = GROUP if size == GROUP else weight.shape[1]
    assert {part.group for part in (rows, *inputs)} == {group}
    assert torch.equal(rows.values, unit_rows(weight))
    seen = []
    block.get("self_attn.o_proj").register_forward_pre_hook(
        lambda _, given: seen.append(given[0].flatten(0, 1))
    )
    for batch in batches:
        run(block, batch)
    assert bool(inputs) == coarse
    if coarse:
        assert torch.equal(torch.cat([part.values for part in inputs]), unit_rows(torch.cat(seen)))


def test_as_many_inputs_are_taken_of_any_number_of_batches(llama, blocks, monkeypatch):
    block, batches = blocks(llama, get("w4a4", GROUP))[0]
    counts, whole = [], batches[0].shape[0]

    def spy(*arguments):
        counts.append(sum(len(part.values) for part in arguments[-1]))
        return learn(*arguments)

    monkeypatch.setattr(value_heads, "learn", spy)
    monkeypatch.setattr(value_heads, "TOKENS", 8)
    alone = [batch.part(slice(i, i + 1)) for batch in batches for i in range(whole)]
    for some in (batches[:1], batches, alone):
        value_heads.rotation_of(block, some, 1)
    assert counts == [8, 8, 8]


def test_o_in_16_bits_keeps_the_hadamard(llama, blocks):
    block, batches = blocks(llama)[0]
    assert isinstance(value_heads.rotation_of(block, batches, 0), Hadamard)
    del block.schemes["self_attn.o_proj"]
    assert isinstance(value_heads.rotation_of(block, batches, 5), Hadamard)


def test_a_channel_without_values_keeps_no_scale_of_its_own(llama, blocks):
    """v's rows of zeros leave o's columns in the scale of the others, however v and o share it."""
    weights = []
    for share in (1.0, 2.0**-6):
        block, _ = blocks(copy.deepcopy(llama))[0]
        v, o = (block.weight(getattr(block.attention, role)) for role in ("v", "o"))
        v[::5] = 0
        v *= share
        o /= share
        value_heads.balance(block)
        weights.append((v, o))
    torch.testing.assert_close(weights[1], weights[0])


def test_a_plan_counts_it(make_model):
    """Each block's work is one more of the steps; rows of W_o are held."""
    config = Checkpoint(make_model("llama")).config

    def counted(**options):
        layers = [{"match": ".*", "scheme": "w4a16", "group_size": 64}]
        turn = {"rotate": {"residual": False} | options}
        given = {"scheme": "test", "layers": layers, "rounding": "rtn"}
        recipe = recipes.parse(given | {"transforms": ["norm-fusion", turn]}, "test")
        job = Job.of(config, recipe)
        shape = block_shape(job, 0, 1, 16)
        return job.transforms[1].work(shape).search_flops, job.transforms[1].held_bytes(shape)

    (none, before), (flops, held) = counted(), counted(learn_steps=10)
    assert none == 0 < flops and counted(learn_steps=20) == (2 * flops, held)
    assert held - before > 2 * config["hidden_size"] ** 2
    assert counted(learn_steps=10, heads=False) == (none, before)
