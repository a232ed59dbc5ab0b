"""The output side of GPTQ's Hessian: gradients at outputs, and rows that make up for each other."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize, silu

from qtool.calibration.forwards import inputs_of
from qtool.calibration.rounding.gptq import output_hessian, rounding, rows
from qtool.calibration.rounding.gptq.gptq import Problem
from qtool.calibration.rounding.gptq.gptq import solve as solve_problems
from qtool.calibration.rounding.gptq.output_hessian import output_hessians
from qtool.calibration.rounding.gptq.rounding import Gptq
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
    for chunk, moved in rows.row_chunks(target, error, g):
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
    stacks = [["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"], ["mlp.down_proj"]]
    found = output_hessians(block, batches, stacks)
    expected = {stack[0]: torch.zeros_like(found[stack[0]]) for stack in stacks}
    random = torch.Generator().manual_seed(0)
    for i in range(2):
        sequence = batches[0].part(slice(i, i + 1))
        drawn = torch.randn(1, 12, 64, generator=random) @ block.sensitivity
        (x,) = inputs_of(block, sequence, "mlp.gate_proj")
        gate, up = x @ block.weight("mlp.gate_proj").T, x @ block.weight("mlp.up_proj").T
        behind = drawn[0] @ block.weight("mlp.down_proj")
        s = gate.sigmoid()
        own = {
            "mlp.down_proj": drawn[0],
            "mlp.gate_proj": torch.cat(
                [behind * up * s * (1 + gate * (1 - s)), behind * silu(gate)], 1
            ),
        }
        for name, gradients in own.items():
            unit = normalize(gradients, dim=1)
            expected[name] += 2 * unit.T @ unit
    for name in own:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-3, atol=1e-4)
    assert found["self_attn.o_proj"].diagonal().sum() == pytest.approx(2 * 24, rel=1e-3)


def test_only_the_first_sequences_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    block, batches = random_block(get("w4a16", 32), [6, 6], hidden_size=64, num_attention_heads=2)
    block.sensitivity = torch.eye(64)
    for sequences, most, tokens in ((1, 99, 6), (3, 99, 18), (9, 99, 24), (9, 17, 12), (9, 5, 6)):
        monkeypatch.setattr(output_hessian, "SEQUENCES", sequences)
        monkeypatch.setattr(output_hessian, "TOKENS", most)
        g = output_hessians(block, batches, [["mlp.down_proj"]])["mlp.down_proj"]
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


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_has_gradients(name: str, blocks) -> None:  # type: ignore[no-untyped-def]
    """Of its dense linears; they reach each of them."""
    for block, batches in blocks(make_model(CONFIGS[name]), get("w4a16", 32)):
        block.sensitivity = torch.eye(96)
        dense = [[*group.linears] for group in block.family.groups if not group.routed]
        found = output_hessians(block, batches, dense)
        assert all(found[stack[0]].diagonal().sum() > 0 for stack in dense)
        rounded = Gptq(output_hessian=True, clip_steps=1).round(block, batches)
        assert rounded.keys() == block.schemes.keys()
