"""Outputs of the attention that looks at the same batches take in place of running it again."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from qtool.calibration import kept_outputs
from qtool.calibration.block import Block
from qtool.calibration.forwards import inputs_of, observe, run
from qtool.calibration.kept_outputs import KeptOutputs, Room
from qtool.calibration.reference import Reference
from qtool.calibration.rounding.gptq import cost, rounding
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.errors import QtoolError
from qtool.models import family_of
from qtool.models.parts import Fold, LinearGroup

from .conftest import CONFIGS, make_model

LAST, GATE = "self_attn.o_proj", "mlp.gate_proj"


@pytest.fixture
def watched(llama, blocks):
    """A block, its batches, and a list that grows with each run of its attention."""
    block, batches = blocks(copy.deepcopy(llama))[0]
    block.schemes = {}
    runs: list[int] = []
    block.get("self_attn.q_proj").register_forward_hook(lambda *_: runs.append(1))
    return block, batches, runs


def keeping(block: Block, batches, room: float = math.inf) -> KeptOutputs:
    block.kept_outputs = kept = KeptOutputs.of(block.family, batches, Room(room))
    assert kept is not None
    return kept


def test_a_later_look_runs_no_attention(watched) -> None:
    """The look at its last linear goes on to its end; one inside it, or at another batch, runs."""
    block, batches, runs = watched
    expected = [inputs_of(block, batches[0], name)[0] for name in (LAST, GATE, "mlp.down_proj")]
    end = run(block, batches[0])
    keeping(block, batches[:1])
    runs.clear()
    inputs_of(block, batches[0], "self_attn.q_proj")
    assert not runs and not block.kept_outputs.outputs
    found = [inputs_of(block, batches[0], LAST)[0]]
    assert len(runs) == 1 and len(block.kept_outputs.outputs) == 1
    found += [inputs_of(block, batches[0], name)[0] for name in (GATE, "mlp.down_proj")]
    assert len(runs) == 1
    assert torch.equal(inputs_of(block, batches[0], LAST, GATE)[0], expected[0]) and len(runs) == 2
    assert torch.equal(run(block, batches[0]), end) and len(runs) == 2
    assert not block.kept_outputs.outputs  # no look follows a run to the block's end
    assert all(map(torch.equal, found, expected))
    for _ in range(2):
        inputs_of(block, copy.copy(batches[0]), GATE)
    assert len(runs) == 4
    assert "forward" not in vars(block.get("self_attn"))


def test_a_last_linear_that_changes_is_applied_to_its_input(watched) -> None:
    block, batches, runs = watched
    block.get(LAST).register_forward_pre_hook(lambda _, inputs: (inputs[0] * 3,))
    kept = keeping(block, batches)
    kept.last_changes = True
    inputs_of(block, batches[0], LAST)
    found = [inputs_of(block, batches[0], GATE)[0]]
    block.weight(LAST).mul_(2)
    kept.last_changes = False
    found += [inputs_of(block, batches[0], GATE)[0] for _ in range(2)]
    assert len(runs) == 1
    block.kept_outputs = None
    expected = inputs_of(block, batches[0], GATE)[0]
    assert not torch.equal(found[0], expected)
    assert all(torch.equal(x, expected) for x in found[1:])


@pytest.mark.parametrize("change", [torch.Tensor.mul, torch.Tensor.mul_])
def test_the_input_of_a_last_linear_is_not_kept_if_its_output_is_changed(change, watched) -> None:
    block, batches, runs = watched
    attention = block.get("self_attn")
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: (change(forward(*args, **kwargs)[0], 2), None)
    keeping(block, batches).last_changes = True
    inputs_of(block, batches[0], LAST)
    assert not block.kept_outputs.outputs
    inputs_of(block, batches[0], GATE)
    assert len(runs) == 2


def test_as_many_are_kept_as_there_is_room_for(watched) -> None:
    block, batches, runs = watched
    keeping(block, batches, room=batches[0].hidden.nbytes)
    for _ in range(2):
        observe(block, batches, {GATE: lambda x: None})
    assert len(batches) > 1 and len(runs) == 2 * len(batches) - 1


def test_a_copy_that_memory_does_not_hold_is_not_kept(watched, monkeypatch) -> None:
    block, batches, runs = watched
    kept = keeping(block, batches)

    def full(output: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(kept_outputs, "_copy", full)
    for _ in range(2):
        observe(block, batches, {GATE: lambda x: None})
    assert len(runs) == 2 * len(batches) and not kept.outputs and not block.notes


@pytest.mark.parametrize(
    ("last", "later", "module"),
    [
        (LAST, GATE, "self_attn"),
        ("self_attn.o_proj.linear", GATE, "self_attn"),
        ("attention.output.dense", "intermediate.dense", "attention"),
        ("layer.attn.out", "layer.mlp.up", "layer.attn"),
        ("out_proj", "up_proj", None),
        (LAST, "self_attn.up_proj", None),
    ],
)
def test_the_module_is_the_outermost_without_later_linears(last, later, module) -> None:
    family = family_of({"model_type": "llama"})
    groups = (
        LinearGroup((last,), "norm", Fold.NONE, writes_residual=True),
        LinearGroup((later,), "norm", Fold.NONE),
    )
    found = KeptOutputs.of(replace(family, groups=groups), [], Room(0))
    assert (found and found.name) == module


def test_a_block_may_change_what_attention_returns(watched) -> None:
    block, batches, _ = watched

    def doubled(module, inputs, output):
        output[0].mul_(2)

    block.get("self_attn").register_forward_hook(doubled)
    expected = inputs_of(block, batches[0], GATE)[0]
    keeping(block, batches)
    for _ in range(3):
        assert torch.equal(inputs_of(block, batches[0], GATE)[0], expected)


def test_a_module_may_return_a_tensor(watched) -> None:
    """As Mamba's does; the run to the block's end takes it too."""
    block, batches, _ = watched
    end, runs = run(block, batches[0]), []
    kept = block.kept_outputs = KeptOutputs("mlp", "mlp.down_proj", batches, Room(math.inf))
    block.get(GATE).register_forward_hook(lambda *_: runs.append(1))
    inputs_of(block, batches[0], "mlp.down_proj")
    assert isinstance(kept.outputs[id(batches[0])][0], torch.Tensor)
    assert torch.equal(run(block, batches[0]), end) and len(runs) == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_an_error_of_the_model_is_one_sentence(keeps: bool, watched) -> None:
    block, batches, _ = watched

    def fails(*_: object) -> None:
        raise ValueError("no such head")

    block.get("self_attn.q_proj").register_forward_hook(fails)
    if keeps:
        keeping(block, batches)
    with pytest.raises(QtoolError, match="no such head"):
        inputs_of(block, batches[0], GATE)


@pytest.mark.parametrize("model", CONFIGS)
def test_rounding_gives_the_same_codes(model: str, blocks, monkeypatch) -> None:
    """On both paths, with inputs that the float block does not keep."""
    monkeypatch.setattr(rounding, "kept_input_bytes", lambda *_: 0)
    found, replayed = [], []
    copied = KeptOutputs.instead

    def counted(self, module, batch, observed, *, to_end):
        replayed.append(id(batch) in self.outputs)
        return copied(self, module, batch, observed, to_end=to_end)

    monkeypatch.setattr(KeptOutputs, "instead", counted)
    for room in (0, 1 << 40):
        monkeypatch.setattr(rounding, "MOST_INPUT_BYTES", room)
        block, batches = blocks(make_model(CONFIGS[model]))[0]
        block.reference = Reference.of(block, {id(b): copy.deepcopy(b) for b in batches})
        assert not any(replayed)
        found.append(Gptq().round(block, batches))
        assert block.kept_outputs is None and block.reference.block.kept_outputs is None
    assert any(replayed)
    none, every = found
    assert none.keys() == every.keys()
    assert all(torch.equal(none[name].codes, every[name].codes) for name in none)


def test_a_gpu_leaves_room_for_what_is_to_come(monkeypatch) -> None:
    """Outputs take what is free beyond a look at the last linears, or the solving before it."""
    family, method = family_of({"model_type": "llama"}), Gptq()
    quantized = {name: (64, 64) for name in family.linears()} | {"mlp.down_proj": (64, 4096)}
    weights = sum(map(math.prod, quantized.values()))
    block = SimpleNamespace(
        device=torch.device("cuda"), family=family, module=torch.nn.Linear(2, 2), budget=2e9
    )
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 5e8)

    def to_come(tokens: int) -> float:
        batches = [SimpleNamespace(shape=(size, tokens)) for size in (1, 2)]
        return 1.5e9 - method.room_for_outputs(block, batches, quantized)  # type: ignore[arg-type]

    last = 64 * 4096  # H and S of down, whose weight is the only exact one that is left
    moments = 4 * (4096**2 + last) + weights + 3 * last
    assert to_come(0) == moments - 4 * weights
    assert to_come(7) - to_come(0) == cost.LOOK_TENSORS * 2 * 7 * 4 * 4096  # of the largest batch
    quantized["mlp.down_proj"] = (64, 64)
    before = to_come(0)
    assert before == to_come(1) > -4 * weights  # solving gate and up takes more than this look
