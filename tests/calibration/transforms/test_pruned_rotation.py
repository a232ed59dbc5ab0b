"""Rotations and orders for pruning: the gradient, what is left out, and what stays the same."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from qtool import recipes
from qtool.calibration.statistics import collect
from qtool.calibration.transforms import rotate
from qtool.calibration.transforms.pruned_rotation import (
    Readers,
    gradient,
    learn_to_prune,
    left_out,
    readers_of,
    without_outliers,
)
from qtool.calibration.transforms.reorder import TOKENS, Reorder
from qtool.io.source import Checkpoint
from qtool.pipeline.job import Job
from qtool.pipeline.planning.work import block_shape
from qtool.pipeline.quantize import Calibration, quantize
from qtool.runtime.load import load
from qtool.schemes import get
from tests.calibration.transforms.test_learned_rotation import norm_outputs
from tests.conftest import MakeModel

K = 32
LAYERS = [{"match": ".*", "scheme": "w4a16-24", "group_size": 32, "layout": "row-major"}]


def readers(seed: int, *counts: int, power: float = 1.0) -> Readers:
    """Weights of these many rows behind a norm whose outputs lie mostly in a few directions."""
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(200, K, generator=random) @ torch.diag(torch.linspace(2, 0, K))
    turn = torch.linalg.qr(torch.randn(K, K, generator=random))[0]
    h = (x @ turn).T @ (x @ turn) / len(x)
    inverse = torch.linalg.inv(h + 0.1 * torch.eye(K))
    rows = [torch.randn(n, K, generator=random).half() for n in counts]
    powers = [torch.tensor(power + i) for i in range(len(counts))]
    return Readers(rows, powers, [(2, 4)] * len(counts), inverse)


def lost(of_norms: list[Readers], q: Tensor) -> Tensor:
    """What pruning leaves out, as the module says it."""
    shares = []
    for own in of_norms:
        cost = (q.T @ own.inverse.to(q.dtype) @ q).diagonal()
        for rows, power in zip(own.rows, own.powers, strict=True):
            score = ((rows.to(q.dtype) @ q).square() / cost).unflatten(1, (-1, 4))
            shares.append(score.sort(-1).values[..., :2].sum((-2, -1)).mean() / power)
    return torch.stack(shares).mean()


def test_the_gradient_is_that_of_what_is_left_out() -> None:
    of_norms = [readers(0, 12, 5), readers(1, 7, power=3.0)]
    q = torch.linalg.qr(torch.randn(K, K, generator=torch.Generator().manual_seed(2)))[0].double()
    lost(of_norms, q.requires_grad_()).backward()
    assert q.grad is not None
    torch.testing.assert_close(
        gradient(of_norms, q.detach().float(), 0).double(), q.grad, rtol=1e-3, atol=1e-4
    )


def test_a_large_row_counts_as_the_median() -> None:
    """One ten times as large counts as it is; a weight that is mostly zeros stays as it is."""
    weight = torch.randn(9, K, generator=torch.Generator().manual_seed(0))
    weight /= weight.norm(dim=1, keepdim=True)
    loud = weight.clone()
    loud[3] *= 100
    torch.testing.assert_close(without_outliers(loud), weight * K**0.5)
    loud[3] /= 10
    torch.testing.assert_close(without_outliers(loud), loud / loud.square().mean().sqrt())
    loud[:5] = 0
    torch.testing.assert_close(without_outliers(loud), loud / loud.square().mean().sqrt())


def test_few_rows_may_have_no_turn() -> None:
    of_norms = [readers(0, 3000, 1)]
    found = [gradient(of_norms, torch.eye(K), step) for step in range(7)]
    assert all(one.isfinite().all() for one in found)


@pytest.mark.parametrize("keeps_ones", [False, True])
def test_it_is_orthogonal_and_less_is_left_out(keeps_ones: bool) -> None:
    of_norms = [readers(0, 200), readers(1, 100, 50)]
    q, one = learn_to_prune(of_norms, 100, keeps_ones), torch.eye(K, dtype=torch.float64)
    torch.testing.assert_close(q @ q.T, one)
    assert lost(of_norms, q) < 0.75 * lost(of_norms, one)
    kept = torch.allclose(one.sum(0) @ q, one.sum(0), atol=1e-5)
    assert kept == keeps_ones
    assert torch.equal(q, learn_to_prune(of_norms, 100, keeps_ones))


def test_pruning_leaves_out_the_least() -> None:
    score = torch.tensor([[4.0, 1.0, 3.0, 2.0, 0.0, 5.0, 6.0, 7.0]])
    assert left_out(score, (2, 4)).tolist() == [
        [False, True, False, True, True, True] + 2 * [False]
    ]
    assert left_out(score, (1, 2)).nonzero()[:, 1].tolist() == [1, 3, 4, 6]


def test_readers_are_of_what_their_norm_puts_out(
    make_model: MakeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, ids, found = make_model("llama"), torch.arange(48).view(2, 24), list[Readers]()

    def spy(of_norms: list[Readers], *arguments: object) -> Tensor:
        found.extend(of_norms)
        return learn_to_prune(of_norms, 1)

    monkeypatch.setattr(rotate, "learn_to_prune", spy)
    pruned(source, tmp_path / "out", 1, ids)
    outputs = norm_outputs(source, ids)
    assert len(found) == len(outputs)  # two a block
    for own, x in zip(found, outputs, strict=True):
        h = x.T @ x / x.square().mean(0).sum() * x.shape[1] / len(x)
        torch.testing.assert_close(
            torch.linalg.inv(own.inverse), h + 0.1 * torch.eye(len(h)), rtol=1e-2, atol=1e-2
        )
        for rows, power in zip(own.rows, own.powers, strict=True):
            assert rows.float().square().mean() == pytest.approx(1, rel=1e-2)
            of_rows = (rows.float() @ h * rows.float()).sum(1).mean()
            assert float(power) == pytest.approx(float(of_rows), rel=2e-2)


def pruned(source: Path, out: Path, steps: int, ids: Tensor | None = None) -> Path:
    """Magnitudes alone choose what is pruned after the rotation, without ``ids`` also in it."""
    turn = {"rotate": {"learn_steps": steps, "heads": False}}
    given = {"scheme": "test", "layers": LAYERS, "transforms": ["norm-fusion", turn]}
    recipe = recipes.parse(given | {"rounding": "rtn" if ids is None else "gptq"}, "test")
    calibration = None if ids is None else Calibration(ids.split(1))
    return quantize(Checkpoint(source), recipe, out, calibration=calibration)


def test_a_pruned_model_is_nearer_to_its_own_after_the_rotation(
    make_model: MakeModel, tmp_path: Path
) -> None:
    source, ids = make_model("llama"), torch.arange(96).view(4, 24)
    outputs = [load(source)(ids).logits]
    outputs += [load(pruned(source, tmp_path / str(n), n, ids))(ids).logits for n in (0, 40)]
    exact, fixed, learned = outputs
    assert (learned - exact).norm() < (fixed - exact).norm()


def test_a_rotation_without_text_goes_by_the_weights(make_model: MakeModel, tmp_path: Path) -> None:
    source, ids = make_model("llama"), torch.arange(96).view(4, 24)
    fixed, learned = (pruned(source, tmp_path / str(n), n) for n in (0, 40))
    exact = load(source)(ids).logits
    errors = [(load(found)(ids).logits - exact).norm() for found in (fixed, learned)]
    assert errors[1] < errors[0]


def test_uncorrelated_outputs_have_the_inverse_of_one(llama, blocks) -> None:
    block, _ = blocks(llama, get("w4a16-24", 32))[0]
    (found,) = readers_of(block, [], {"self_attn.q_proj": "input_layernorm"})
    torch.testing.assert_close(found.inverse, torch.eye(len(found.inverse)) / 1.1)


def test_inputs_of_zeros_have_a_finite_inverse(llama, blocks) -> None:
    block, batches = blocks(llama, get("w4a16-24", 32))[0]
    for batch in batches:
        batch.hidden.zero_()
    (found,) = readers_of(block, batches, {"self_attn.q_proj": "input_layernorm"})
    torch.testing.assert_close(found.inverse, torch.eye(len(found.inverse)) * 10)


def test_logits_stay_in_an_order_for_pruning(any_model, transformed, logits) -> None:
    transforms = [Reorder(groups=("norm", "heads", "product"))]
    reordered = transformed(any_model, transforms, get("w4a16-24", 32))
    torch.testing.assert_close(logits(reordered), logits(any_model), rtol=1e-4, atol=1e-4)


def test_down_is_ordered_so_that_pruning_leaves_out_less(llama, blocks) -> None:
    block, batches = blocks(llama, get("w4a16-24", 32))[0]

    def lost_in_down() -> float:
        inputs = collect(block, batches, ["mlp.down_proj"], tokens=TOKENS)["mlp.down_proj"].sample
        score = block.weight("mlp.down_proj").square() * inputs.square().mean(0)
        return float((score * left_out(score, (2, 4))).sum())

    before = lost_in_down()
    Reorder(groups=("product",)).apply(block, batches)
    assert 0 < lost_in_down() < 0.95 * before


def test_a_plan_counts_both(make_model: MakeModel) -> None:
    config = Checkpoint(make_model("llama")).config

    def counted(scheme: str, number: int) -> tuple[float, int]:
        steps = ["norm-fusion", {"rotate": {"learn_steps": 9, "heads": False}}, "reorder"]
        given = {"layers": [LAYERS[0] | {"scheme": scheme}], "transforms": steps}
        job = Job.of(config, recipes.parse(given | {"scheme": "test", "rounding": "rtn"}, "test"))
        method, shape = job.transforms[number], block_shape(job, 0, 1, 16)
        work = method.work(shape)
        return work.search_flops + work.search_weights, method.learning_bytes(shape)

    hidden, blocks = config["hidden_size"], config["num_hidden_layers"]
    (flops, held), (dense_flops, dense_held) = (
        counted(scheme, 1) for scheme in ("w4a16-24", "w4a16")
    )
    assert held - dense_held == 4 * 2 * blocks * hidden**2
    assert flops - dense_flops == pytest.approx(9 * 4 * 2 * hidden**3)
    assert counted("w4a16-24", 2)[0] > 0 == counted("w4a16", 2)[0]
