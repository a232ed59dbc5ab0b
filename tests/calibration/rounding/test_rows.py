"""The output side of GPTQ's Hessian: gradients at outputs, and rows that make up for each other."""

import copy
from itertools import chain
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

from qtool.calibration.forwards import inputs_of
from qtool.calibration.rounding.gptq import output_hessian, rounding, rows
from qtool.calibration.rounding.gptq.gptq import Problem
from qtool.calibration.rounding.gptq.gptq import solve as solve_problems
from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.calibration.rounding.gptq.output_hessian import output_hessians
from qtool.calibration.rounding.gptq.rounding import Gptq, Stack, problems_in_turn
from qtool.schemes import SCHEMES, get
from tests.calibration.conftest import CONFIGS, make_model, random_block
from tests.calibration.rounding.test_gptq import problem

DENSE = [name for name, scheme in SCHEMES.items() if scheme.sparsity is None]


def moments(n: int, seed: int = 3) -> Tensor:
    """Second moments ``[n, n]`` of correlated gradients of uneven size."""
    random = torch.Generator().manual_seed(seed)
    mixing = torch.randn(n, n, generator=random) * torch.rand(n, generator=random)
    g = torch.randn(8 * n, n, generator=random) @ mixing
    return g.T @ g


@pytest.mark.parametrize("n", [30, 3])
def test_a_chunk_makes_up_for_the_errors_of_those_before(n: int) -> None:
    """The rows that are left would cancel what the errors cost, if they were free to do so."""
    random, k = torch.Generator().manual_seed(0), 7
    target, error = torch.randn(n, k, generator=random), torch.zeros(n, k)
    g = moments(n)
    damped = g + rows.DAMPING * g.diagonal().mean() * torch.eye(n)
    done: list[int] = []
    for chunk, (moved,) in rows.row_chunks([target], [error], g):
        left = [row for row in range(n) if row not in done]
        best = -torch.linalg.solve(damped[left][:, left], damped[left][:, done] @ error[done])
        place = [left.index(row) for row in chunk.tolist()]
        torch.testing.assert_close(target[chunk] - moved, best[place], rtol=1e-3, atol=1e-3)
        error[chunk] = torch.randn(len(chunk), k, generator=random)
        done += chunk.tolist()
    assert sorted(done) == list(range(n))


def solved(name: str, outputs: Tensor | None, **options: float) -> tuple[Tensor, Tensor]:
    """The error ``[N, K]`` of a weight rounded with this G, and H."""
    scheme, (weight, hessian) = get(name), problem(n=32)
    of = Problem(scheme, weight, hessian, outputs=outputs)
    (found,) = solve_problems([of], Gptq(residual=0, **options))
    scheme.check(found.codes, found.params)
    return weight - scheme.dequantize(found.codes, found.params), hessian.h


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_that_share_no_error_are_rounded_as_if_alone(name: str) -> None:
    alone, _ = solved(name, None)
    for outputs in (torch.eye(32), torch.zeros(32, 32)):
        beside, _ = solved(name, outputs)
        # products of fewer rows may add in another order and tip a weight midway between codes
        assert ((beside - alone).abs() > 1e-6).float().mean() < 0.02


@pytest.mark.parametrize("name", DENSE)
def test_the_shared_cost_falls(name: str) -> None:
    g = moments(32)
    costs = [
        float(torch.einsum("nm,nk,kl,ml->", g, error, h, error))
        for error, h in (solved(name, None), solved(name, g))
    ]
    assert costs[1] < 0.9 * costs[0]


def test_gradients_at_outputs_are_those_of_the_block() -> None:
    """At down they are what is drawn; at gate and up, that through down's weight and SiLU."""
    block, batches = random_block(get("w4a16", 32), [12], hidden_size=64, num_attention_heads=2)
    block.sensitivity = torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).triu()
    gate_up = "mlp.gate_proj", "mlp.up_proj"
    stacks = {("self_attn.o_proj",): 64, gate_up: 256, ("mlp.down_proj",): 64}
    found = output_hessians(block, batches, stacks)
    expected = {stack: torch.zeros_like(g) for stack, g in found.items()}
    random = torch.Generator().manual_seed(0)
    for i in range(2):
        sequence = batches[0].part(slice(i, i + 1))
        drawn = torch.randn(1, 12, 64, generator=random) @ block.sensitivity
        (x,) = inputs_of(block, sequence, "mlp.gate_proj")
        gate, up = x @ block.weight("mlp.gate_proj").T, x @ block.weight("mlp.up_proj").T
        behind = drawn[0] @ block.weight("mlp.down_proj")
        s = gate.sigmoid()
        own = {
            ("mlp.down_proj",): drawn[0],
            gate_up: torch.cat([behind * up * s * (1 + gate * (1 - s)), behind * silu(gate)], 1),
        }
        for stack, gradients in own.items():
            unit = normalize(gradients, dim=1)
            expected[stack] += 2 * unit.T @ unit
    for stack in own:
        torch.testing.assert_close(found[stack], expected[stack], rtol=1e-3, atol=1e-4)
    assert found["self_attn.o_proj",].diagonal().sum() == pytest.approx(2 * 24, rel=1e-3)


def test_only_the_first_sequences_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    block, batches = random_block(get("w4a16", 32), [6, 6], hidden_size=64, num_attention_heads=2)
    block.sensitivity = torch.eye(64)
    for sequences, most, tokens in ((1, 99, 6), (3, 99, 18), (9, 99, 24), (9, 17, 12), (9, 5, 6)):
        monkeypatch.setattr(output_hessian, "SEQUENCES", sequences)
        monkeypatch.setattr(output_hessian, "TOKENS", most)
        (g,) = output_hessians(block, batches, {("mlp.down_proj",): 64}).values()
        assert g.diagonal().sum() == pytest.approx(2 * tokens, rel=1e-4)


def test_a_weight_of_too_many_rows_is_rounded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    block, batches = random_block(get("w4a16", 32), [12], hidden_size=64, num_attention_heads=2)
    block.sensitivity = torch.eye(64)
    method = Gptq(output_hessian=True)
    every = method.outputs(block, None, batches)
    monkeypatch.setattr(rounding, "MOST_ROWS", max(map(len, every.values())) - 1)
    few = method.outputs(block, None, batches)
    assert few.keys() == {
        name for name, g in every.items() if len(g) < max(map(len, every.values()))
    }
    monkeypatch.setattr(rounding, "MOST_ROWS", 1)
    assert method.outputs(block, None, batches) == {}


def test_problems_with_one_g_get_what_each_gets_alone() -> None:
    scheme, g = get("w4a8-lqq"), moments(32)
    problems = [Problem(scheme, *problem(n=32, seed=seed), outputs=g) for seed in range(3)]
    for own, together in zip(problems, solve_problems(problems, Gptq()), strict=True):
        (alone,) = solve_problems([own], Gptq())
        assert torch.equal(alone.codes, together.codes) and torch.equal(alone.lost, together.lost)
        assert all(torch.equal(alone.params[key], together.params[key]) for key in alone.params)


def test_stacks_of_another_g_are_solved_apart() -> None:
    block, _ = random_block(get("w4a16", 32), [12], hidden_size=64, num_attention_heads=2)
    hessian, one, other = Hessian.of(torch.eye(64)), moments(128), moments(128, seed=4)
    for g, expected in ((one, [[0, 1]]), (other, [[0], [1]])):
        stacks = [Stack(["mlp.gate_proj"], hessian, one), Stack(["mlp.up_proj"], hessian, g)]
        assert [[*numbers] for numbers in problems_in_turn(block, stacks)] == expected


def test_experts_are_weighed_by_the_gradients_of_their_sum(blocks) -> None:  # type: ignore[no-untyped-def]
    """Mixtral's experts write last: there the gradients are those that are drawn."""
    block, batches = blocks(make_model(CONFIGS["mixtral"]), get("w4a16", 32))[0]
    random = torch.Generator().manual_seed(1)
    block.sensitivity = torch.randn(96, 96, generator=random).triu()
    method = Gptq(output_hessian=True)
    found = method.outputs(block, None, batches)["block_sparse_moe.experts",]
    expected = torch.zeros_like(found)
    for number, batch in enumerate(batches):
        random = torch.Generator().manual_seed(number << 16)
        for sequence in batch.hidden:
            drawn = torch.randn(1, *sequence.shape, generator=random) @ block.sensitivity
            unit = normalize(drawn[0], dim=1)
            expected += 2 * unit.T @ unit
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    whole = method.round(copy.deepcopy(block), batches)
    outputs = method.outputs(block, None, batches)
    del outputs["block_sparse_moe.experts",]
    with mock.patch.object(Gptq, "outputs", lambda *_: outputs):
        without = method.round(copy.deepcopy(block), batches)
    changed = {name for name in whole if not torch.equal(whole[name].codes, without[name].codes)}
    assert changed == {f"block_sparse_moe.experts.{expert}.w2" for expert in range(4)}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_has_gradients(name: str, blocks) -> None:  # type: ignore[no-untyped-def]
    """They reach all dense linears, and the sum of the experts."""
    for block, batches in blocks(make_model(CONFIGS[name]), get("w4a16", 32)):
        block.sensitivity = torch.eye(96)
        method = Gptq(output_hessian=True, clip_steps=1)
        found = method.outputs(block, None, batches)
        assert all(g.diagonal().sum() > 0 for g in found.values())
        groups = block.family.groups
        weighed = {*chain(*found)}
        assert weighed >= {name for g in groups if not g.routed for name in g.linears}
        assert any(g.routed for g in groups) == any(name.endswith("experts") for name in weighed)
        rounded = method.round(block, batches)
        assert rounded.keys() == block.schemes.keys()
