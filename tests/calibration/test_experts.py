"""Experts on their own: they add up to transformers' stacked ones, and starved ones are rounded by
their weights.
"""

import json
import weakref
from itertools import chain

import pytest
import torch
from torch import nn

import qtool
from qtool.calibration import forwards
from qtool.calibration.block import Block
from qtool.calibration.expert_tokens import NOTE, add_tokens
from qtool.calibration.forwards import by_place, inputs_of, observe, run
from qtool.calibration.rounding.gptq import memory
from qtool.calibration.rounding.gptq import rounding as gptq_rounding
from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.calibration.rounding.gptq.rounding import Gptq, output_modules
from qtool.calibration.rounding.rtn import round_to_nearest
from qtool.calibration.stacking import by_role
from qtool.calibration.transforms.clip import Clip
from qtool.calibration.transforms.smooth import Smooth
from qtool.models import family_of
from qtool.models.auto import auto_class
from qtool.models.experts import SeparateExperts, separate_experts
from qtool.pipeline.verify import verify
from qtool.runtime.load import load
from tests.calibration.conftest import CONFIGS, TOKENS, make_model
from tests.models.tiny import save_tiny, tiny_config

MIXTURES = ("mixtral", "qwen2-moe", "qwen3-moe")
CALIBRATED = {"layers": [{"match": ".*", "scheme": "w4a16"}], "rounding": "gptq"}
ALONE = "rounded by weight alone, tokens seen"


@pytest.mark.parametrize("name", MIXTURES)
def test_apart_they_give_the_same_logits_under_the_names_on_disk(name, logits, tmp_path):
    from safetensors import safe_open

    model = make_model(CONFIGS[name])
    model.save_pretrained(tmp_path)
    stacked = logits(model)
    separate_experts(model)
    torch.testing.assert_close(logits(model), stacked, rtol=1e-5, atol=1e-5)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(dict(model.named_parameters()))
        for key, parameter in model.named_parameters():
            assert torch.equal(file.get_tensor(key), parameter)
    separate_experts(model)  # a second time changes nothing
    assert isinstance(model.model.layers[0].mlp.experts, SeparateExperts)


@pytest.fixture
def starved():
    """A Mixtral whose router sends every token to expert 0 or 1, to one of them only."""
    config = CONFIGS["mixtral"]
    model = make_model(config)
    for layer in model.model.layers:
        layer.mlp.gate.top_k = 1
        router = layer.mlp.gate.weight.data
        router[1], router[2], router[3] = -router[0], 0.5 * router[0], 0 * router[0]
    return model


def test_an_expert_without_tokens_is_rounded_by_its_weights_and_named(starved, blocks):
    block, batches = blocks(starved)[0]
    hungry = {f"block_sparse_moe.experts.{e}.{w}" for e in (2, 3) for w in ("w1", "w2", "w3")}
    expected = {
        name: round_to_nearest(block.schemes[name], block.weight(name).clone()) for name in hungry
    }
    rounded = Gptq().round(block, batches)
    assert block.notes[ALONE] == dict.fromkeys(hungry, 0)
    assert set(block.notes["gptq"]) == set(block.schemes) - hungry
    for name in block.schemes:
        block.schemes[name].check(rounded[name].codes, rounded[name].params)
        assert (name in hungry) == (
            name in expected and torch.equal(rounded[name].codes, expected[name].codes)
        )


@pytest.mark.parametrize("at_once", [1, 3])
def test_experts_whose_hessians_are_held_in_turn_get_the_same_codes(at_once, blocks, monkeypatch):
    (block, batches), (other, its_batches) = (
        blocks(make_model(CONFIGS["qwen2-moe"]))[0] for _ in range(2)
    )
    expected, made, most = Gptq().round(block, batches), [], []

    class Counted(gptq_rounding.Hessian):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            made.append(weakref.ref(self))
            most.append(sum(hessian() is not None for hessian in made))

    monkeypatch.setattr(memory, "MOST_HESSIAN_BYTES", at_once * 4 * 96 * 96)
    monkeypatch.setattr(gptq_rounding, "Hessian", Counted)
    found = Gptq().round(other, its_batches)
    assert max(most) == at_once  # of 4
    for name, rounded in expected.items():
        assert torch.equal(rounded.codes, found[name].codes)
        assert all(torch.equal(t, found[name].params[key]) for key, t in rounded.params.items())


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_together_get_the_codes_of_each_alone(name, blocks, monkeypatch):
    found, sizes = [], []
    for limit in (memory.MOST_PROBLEM_BYTES, 3 * memory.problem_bytes(128, 128), 1):
        block, batches = blocks(make_model(CONFIGS[name]))[0]
        monkeypatch.setattr(memory, "MOST_PROBLEM_BYTES", limit)
        solve, most = gptq_rounding.solve, [0]

        def counted(problems, options, solve=solve, most=most):
            most[0] = max(most[0], len(problems))
            return solve(problems, options)

        with monkeypatch.context() as patched:
            patched.setattr(gptq_rounding, "solve", counted)
            found.append(Gptq().round(block, batches))
        sizes.append(most[0])
    assert sizes[0] > sizes[2] == 1
    for other in found[1:]:
        for linear, rounded in found[0].items():
            assert torch.equal(rounded.codes, other[linear].codes)
            assert all(
                torch.equal(t, other[linear].params[key]) for key, t in rounded.params.items()
            )


def test_experts_moments_are_added_when_the_forward_is_over(blocks, monkeypatch):
    """If the memory runs out in a forward, it is run again in halves: no token is added twice."""
    running, added = [], []
    forward, add = forwards._forward, Hessian.add

    def watched(*args, **kwargs):
        running.append(True)
        try:
            return forward(*args, **kwargs)
        finally:
            running.pop()

    def counted(self, *args):
        added.append(bool(running))
        add(self, *args)

    monkeypatch.setattr(forwards, "_forward", watched)
    monkeypatch.setattr(Hessian, "add", counted)
    block, batches = blocks(make_model(CONFIGS["mixtral"]))[0]
    groups = [group for group in block.family.groups if group.routed]
    Gptq().moments_of_experts(block, batches, [list(group.linears) for group in groups])
    assert len(added) >= len(groups) and not any(added)


@torch.no_grad()
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_at_once_give_what_one_after_another_gives(name):
    """And whatever they observe beside it."""
    model = make_model(CONFIGS[name])
    separate_experts(model)
    experts = model.model.layers[0].mlp.experts
    hidden, weights = torch.randn(13, 96), torch.rand(13, 2)
    index = torch.rand(13, 5).topk(2).indices  # 4 is an expert that does nothing
    expected, seen = experts(hidden, index, weights), {}
    down = experts.roles["down"]
    experts.observers[down] = lambda x, counts: seen.update(x=x, counts=counts)
    torch.testing.assert_close(experts(hidden, index, weights), expected, rtol=1e-5, atol=1e-5)
    assert seen["counts"] == [int((index == number).sum()) for number in range(4)]
    first = seen["x"]
    experts.added_tokens = torch.zeros(13, 4, dtype=torch.bool)
    experts.added_tokens[:, 1] = ~(index == 1).any(1)
    torch.testing.assert_close(experts(hidden, index, weights), expected, rtol=1e-5, atol=1e-5)
    start, alone = seen["counts"][0], (index == 1).sum()
    assert seen["counts"][1] == 13 and len(seen["x"]) == len(first) + 13 - alone
    torch.testing.assert_close(seen["x"][start : start + alone], first[start : start + alone])


@torch.no_grad()
@pytest.mark.parametrize("least", [5, 40, 1000])
def test_an_expert_observes_the_tokens_its_router_thinks_likeliest(starved, blocks, least):
    block, batches = blocks(starved)[0]
    expected = [run(block, batch) for batch in batches]
    add_tokens(block, batches, batches, least)
    total, name = 64, "block_sparse_moe.experts"
    counts = block.notes[NOTE]
    routed = [counts[f"{name}.{e}"]["routed"] for e in range(4)]
    added = [counts[f"{name}.{e}"]["added"] for e in range(4)]
    assert sum(routed) == total and routed[2:] == [0, 0]
    assert [r + a for r, a in zip(routed, added, strict=True)] == [
        max(r, min(least, total)) for r in routed
    ]
    inputs = [*chain(*(inputs_of(block, batch, "block_sparse_moe.gate") for batch in batches))]
    likely = (torch.cat(inputs) @ block.weight("block_sparse_moe.gate").T).softmax(1)
    more = torch.cat([batch.added_tokens.flatten(0, 1) for batch in batches])
    for expert in (2, 3):
        assert more[:, expert].sum() == min(least, total)
        others = likely[~more[:, expert], expert]
        assert not len(others) or likely[more[:, expert], expert].min() >= others.max()
    places = by_place(block, [f"{name}.{e}.w2" for e in range(4)])
    assert list(places) == [f"{name}.*.w2"]
    seen = []
    observe(block, batches, {f"{name}.*.w2": lambda x, counts: seen.append(counts)})
    assert torch.tensor(seen).sum(0).tolist() == [r + a for r, a in zip(routed, added, strict=True)]
    for batch, before in zip(batches, expected, strict=True):
        assert torch.equal(run(block, batch), before)
    halves = torch.cat([half.added_tokens for half in batches[0].halves()])
    assert torch.equal(halves, batches[0].added_tokens)


def test_with_added_tokens_no_expert_is_rounded_by_its_weights(starved, blocks):
    block, batches = blocks(starved)[0]
    add_tokens(block, batches, batches, 32)
    Gptq().round(block, batches)
    assert ALONE not in block.notes and set(block.notes["gptq"]) == set(block.schemes)
    assert block.notes[NOTE]["block_sparse_moe.experts.2"] == {"routed": 0, "added": 32}
    assert block.notes["gptq"]["block_sparse_moe.experts.2.w2"]["tokens"] == 32


@pytest.mark.parametrize("variant", ["mixtral", "llama4_text"])
def test_gradients_are_those_of_transformers(variant, monkeypatch):
    """One expert after another, as on a CPU, and all at once, as on a GPU."""
    model = auto_class(config := tiny_config(variant)).from_config(config).eval()
    x = torch.randn(1, 7, config.hidden_size)

    def gradient():
        own = x.clone().requires_grad_()
        block = model.get_submodule(family_of(config).blocks)[0]
        moe = next(m for m in block.modules() if hasattr(m, "experts"))
        found = moe(own)
        found = found[0] if isinstance(found, tuple) else found
        return torch.autograd.grad(found.square().sum(), own)[0]

    expected = gradient()
    separate_experts(model)
    torch.testing.assert_close(gradient(), expected, rtol=1e-4, atol=1e-5)

    def at_once(self, hidden, counts):
        yield slice(0, sum(counts)), list(counts), 0

    monkeypatch.setattr(SeparateExperts, "turns", at_once)
    torch.testing.assert_close(gradient(), expected, rtol=1e-4, atol=1e-5)


def test_experts_that_are_told_no_routing_observe_what_goes_to_them():
    """Llama 4 gives each expert all tokens, and 0 for one that does not go to it."""
    model = auto_class(config := tiny_config("llama4_text")).from_config(config).eval()
    ids, seen = TOKENS + 1, []  # 0 pads: its embedding is 0
    before = model(ids).logits
    separate_experts(model)
    experts = model.model.layers[0].feed_forward.experts
    experts.observers["gate_proj"] = lambda x, counts: seen.append((x, counts))
    torch.testing.assert_close(model(ids).logits, before, rtol=1e-5, atol=1e-5)
    ((x, counts),) = seen
    assert len(x) == sum(counts) == TOKENS.numel() * config.num_experts_per_tok
    assert x.any(1).all() and len(counts) == len(experts)


def test_experts_that_are_told_no_routing_have_no_gradients_of_a_sum():
    """Their module returns the outputs of each expert for all tokens."""
    model = auto_class(config := tiny_config("llama4_text")).from_config(config).eval()
    family = family_of(config).at(config, 0)
    separate_experts(model)
    block = Block(0, model.get_submodule(family.blocks)[0], family, config, {})
    routed = [group for group in family.groups if group.routed and group.writes_residual]
    assert routed and not any(output_modules(block, group.linears) for group in routed)


def test_experts_that_are_told_no_routing_are_given_no_tokens(tmp_path):
    model = save_tiny("llama4_text", tmp_path / "model")
    ids = torch.arange(3, 259).view(8, 32)
    done = qtool.quantize(
        model, "w4a16", recipe=CALIBRATED, out=tmp_path / "out", calibration=ids, samples=8
    )
    for notes in json.loads((done.directory / "qtool.json").read_text())["blocks"]:
        assert NOTE not in notes and ALONE not in notes
        assert any(".experts.3." in name for name in notes["gptq"])


@pytest.mark.parametrize("rounding", ["rtn", "gptq"])
@pytest.mark.parametrize(("kind", "experts"), [("gpt_oss", "mlp"), ("llama4_text", "feed_forward")])
def test_experts_of_other_forms_rotate_what_down_reads(kind, experts, rounding, tmp_path):
    """Biases and a gate of its own, gate and up in turns; and no routing."""
    model = save_tiny(kind, tmp_path / "model", intermediate_size=128)
    rule = {"match": ".*", "scheme": "w8a8", "group_size": "channel"}
    recipe = {"layers": [rule], "transforms": ["online-hadamard"], "rounding": rounding}
    ids = torch.arange(3, 131).view(4, 32)
    done = qtool.quantize(
        model, "w8a8", recipe=recipe, out=tmp_path / "out", calibration=ids, samples=4
    )
    stored = json.loads((done.directory / "config.json").read_text())["quantization_config"]
    assert f"{experts}.experts.*.down_proj" in stored["rotated"]
    assert not [row for row in verify(done.directory) if row.problem]
    expected, found = (load(folder)(ids).logits for folder in (model, done.directory))
    assert (found - expected).norm() < 0.1 * expected.norm()


def test_transforms_leave_starved_experts_to_themselves(starved, blocks):
    block, batches = blocks(starved)[0]
    before = run(block, batches[0])
    Smooth(steps=2).apply(block, batches)
    Clip(steps=2).apply(block, batches)
    torch.testing.assert_close(run(block, batches[0]), before, rtol=1e-3, atol=1e-3)
    assert "block_sparse_moe.experts.2.w1" in block.notes[ALONE]
    assert "block_sparse_moe.experts.2.w1" not in block.clips


@pytest.mark.parametrize("name", MIXTURES)
def test_all_experts_are_observed_at_once(name):
    config = CONFIGS[name]
    groups = family_of(config).at(config, 0).groups
    assert [len(same) for same in by_role(groups)][2:4] == [4, 4]
    assert [group for same in by_role(groups) for group in same] == list(groups)


def test_the_router_is_no_linear_to_quantize(blocks):
    model = make_model(CONFIGS["qwen2-moe"])
    (block, _), *_ = blocks(model)
    assert isinstance(block.get("mlp.shared_expert_gate"), nn.Linear)
    assert not {"mlp.gate", "mlp.shared_expert_gate"} & set(block.schemes)
