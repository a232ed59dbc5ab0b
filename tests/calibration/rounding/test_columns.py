"""GPTQ and its sweep by panels equal the method written column by column.

It runs on the CPU and on a GPU.
"""

import pytest
import torch
from torch import Tensor

from qtool.calibration.rounding.gptq import columns, columns_triton, sparsegpt
from qtool.calibration.rounding.gptq.columns import sweep
from qtool.calibration.rounding.gptq.factor import Factor
from qtool.calibration.rounding.gptq.gptq import GptqOptions, descent_feedback, gptq
from qtool.schemes import get
from qtool.schemes.base import Grid


def correlated(
    n: int, k: int, dtype: torch.dtype = torch.float64, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """A weight ``[n, k]`` and the Hessian ``[k, k]`` of correlated inputs."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * k, k, generator=gen, dtype=dtype) @ torch.randn(
        k, k, generator=gen, dtype=dtype
    )
    return torch.randn(n, k, generator=gen, dtype=dtype), 2 * x.T @ x


def four_bits(weight: Tensor, groups: int) -> Grid:
    """An asymmetric 4-bit grid, some groups with fewer legal codes."""
    low, high = (f(weight.unflatten(1, (groups, -1)), -1) for f in (torch.amin, torch.amax))
    first = torch.zeros_like(low, dtype=torch.int32)
    first[::2] = 2
    return Grid((high - low) / 15, low, first, torch.full_like(first, 15))


def reference_gptq(weight: Tensor, hessian: Tensor, grid: Grid, group: Tensor) -> Tensor:
    """GPTQ as in the paper (algorithm 1): one column at a time, through the Cholesky factor of the
    inverse.
    """
    weight = weight.clone()
    inverse = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    codes = torch.empty_like(weight)
    for k in range(weight.shape[1]):
        step, offset = grid.step[:, group[k]], grid.offset[:, group[k]]
        code = torch.round((weight[:, k] - offset) / step)
        codes[:, k] = code.clamp(grid.low[:, group[k]], grid.high[:, group[k]])
        error = (weight[:, k] - codes[:, k] * step - offset) / inverse[k, k]
        weight[:, k:] -= error[:, None] * inverse[k, k:]
    return codes


def sweep_one(
    weight: Tensor,
    error: Tensor,
    feedback: Tensor,
    grid: Grid,
    group: Tensor,
    keep: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    """:func:`sweep` of one problem, whose tensors lack the first dimension."""
    one = Grid(*(field[None] for field in vars(grid).values()))
    kept = None if keep is None else keep[None]
    own = weight[None], error[None], feedback[None], one, group[None]
    return sweep(*own, keep=kept, causal=causal)[0]


def values(codes: Tensor, grid: Grid, group: Tensor) -> Tensor:
    return codes * grid.step[:, group] + grid.offset[:, group]


@pytest.mark.parametrize("panel", [1, 7, 32, 128])
def test_a_sweep_by_panels_is_gptq_column_by_column(
    panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PANEL", panel)
    weight, hessian = correlated(24, 64)
    grid = four_bits(weight, 4)
    group = torch.randperm(64, generator=torch.Generator().manual_seed(1)) // 16
    error = torch.zeros_like(weight)
    feedback = Factor(hessian.clone(), 0.0).feedback
    codes = sweep_one(weight, error, feedback, grid, group, causal=True)
    assert torch.equal(codes, reference_gptq(weight, hessian, grid, group))
    torch.testing.assert_close(error, weight - values(codes, grid, group))


@pytest.mark.parametrize("name", ["w4a8-qoq", "w4a8-lqq"])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_without_its_extras_is_that_of_the_paper(name: str, act_order: bool) -> None:
    scheme, (weight, hessian) = get(name), correlated(12, 128)
    single, h = weight.float(), hessian.float()
    options = GptqOptions(damping=0.01, act_order=act_order, clip_steps=1, rounds=0)
    codes, params = gptq(single, scheme, hessian=h, options=options)
    order = h.diagonal().argsort(descending=True) if act_order else torch.arange(128)
    damped = h.double() + 0.01 * h.double().diagonal().mean() * torch.eye(128)
    group = order // scheme.groups(single).shape[2]
    visited, grid = single.double()[:, order], scheme.grid(scheme.fit(single))
    expected = reference_gptq(visited, damped[order][:, order], grid, group)
    # no weight lies within 0.0002 of a step of the middle between two codes
    assert torch.equal(codes, expected[:, order.argsort()].to(codes.dtype))
    assert all(torch.equal(params[key], t) for key, t in scheme.fit(single).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("sparse", [False, True])
def test_problems_together_get_the_codes_of_each_alone(
    dtype: torch.dtype, sparse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PANEL", 16)
    made = [correlated(13, 40, dtype, seed) for seed in range(3)]
    grids = [four_bits(weight, 4) for weight, _ in made]
    groups = [
        torch.randperm(40, generator=torch.Generator().manual_seed(i)) // 10 for i in range(3)
    ]
    keep = (
        torch.rand(3, 13, 40, generator=torch.Generator().manual_seed(7)) < 0.7 if sparse else None
    )
    start = torch.stack([weight for weight, _ in made])
    all_fields = (
        torch.stack(list(bounds))
        for bounds in zip(*(vars(grid).values() for grid in grids), strict=True)
    )
    grid, group = Grid(*all_fields), torch.stack(groups)
    for causal in (True, False):
        feedback = [
            Factor(h.clone(), 0.01).feedback if causal else descent_feedback(h) for _, h in made
        ]
        error = 0.1 * start.flip(0) * (not causal)
        expected, lefts = [], []
        for i in range(3):
            left = error[i].clone()
            kept = None if keep is None else keep[i]
            expected.append(
                sweep_one(
                    start[i],
                    left,
                    feedback[i],
                    grids[i],
                    groups[i],
                    causal=causal,
                    keep=kept,
                )
            )
            lefts.append(left)
        found = sweep(start, error, torch.stack(feedback), grid, group, causal=causal, keep=keep)
        assert torch.equal(found, torch.stack(expected)) and torch.equal(error, torch.stack(lefts))


@pytest.mark.parametrize("panel", [5, 64])
def test_after_descent_no_single_code_can_be_better(
    panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "PANEL", panel)
    weight, hessian = correlated(8, 32)
    grid, group = four_bits(weight, 2), torch.arange(32) // 16
    error = torch.zeros_like(weight)
    codes = sweep_one(weight, error, Factor(hessian.clone(), 0.0).feedback, grid, group)
    first = before = (error @ hessian * error).sum()
    for _ in range(20):
        codes = sweep_one(weight, error, descent_feedback(hessian), grid, group)
        now = (error @ hessian * error).sum()
        assert now <= before + 1e-9
        before = now
    assert before < first
    for change in (-1, 1):
        for k in range(32):
            other = codes.clone()
            other[:, k] = (other[:, k] + change).clamp(
                grid.low[:, group[k]], grid.high[:, group[k]]
            )
            e = weight - values(other, grid, group)
            assert ((e @ hessian * e).sum(1) >= (error @ hessian * error).sum(1) - 1e-9).all()


def test_pruned_weights_are_zero_and_the_others_make_up_for_it() -> None:
    weight, hessian = correlated(16, 32)
    step = weight.abs().amax(1, keepdim=True) / 7
    bound = torch.full_like(step, 8, dtype=torch.int32)
    grid = Grid(step, torch.zeros_like(step), -bound, bound - 1)
    group = torch.zeros(32, dtype=torch.long)
    keep = torch.rand(16, 32, generator=torch.Generator().manual_seed(2)) < 0.5
    error = torch.zeros_like(weight)
    codes = sweep_one(weight, error, Factor(hessian.clone(), 0.0).feedback, grid, group, keep=keep)
    assert (codes[~keep] == 0).all()
    plain = weight - values(grid.nearest((weight * keep)[:, None])[:, 0], grid, group)
    assert (error @ hessian * error).sum() < (plain @ hessian * plain).sum()


@pytest.mark.cuda
@pytest.mark.parametrize(("n", "k", "panel", "sparse"), [(5, 48, 16, False), (37, 40, 24, True)])
@pytest.mark.parametrize("causal", [True, False])
def test_fused_kernel_equals_torch(
    n: int, k: int, panel: int, sparse: bool, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (columns, columns_triton):
        monkeypatch.setattr(module, "PANEL", panel)
    weight, hessian = correlated(n, k, torch.float32)
    grid = four_bits(weight, 2)
    group = torch.randperm(k, generator=torch.Generator().manual_seed(1)) // (k // 2)
    keep = torch.rand(n, k, generator=torch.Generator().manual_seed(3)) < 0.5 if sparse else None
    feedback = Factor(hessian.clone(), 0.01).feedback if causal else descent_feedback(hessian)
    error = (
        torch.zeros(n, k)
        if causal
        else 0.1 * torch.randn(n, k, generator=torch.Generator().manual_seed(4))
    )
    error_at_start, on_device = error.clone(), error.clone().to("cuda")
    expected = sweep_one(weight, error, feedback, grid, group, causal=causal, keep=keep)
    moved = [t.to("cuda") for t in (weight, feedback, group)]
    fields = Grid(*(f.to("cuda") for f in vars(grid).values()))
    kept = None if keep is None else keep.to("cuda")
    one = Grid(*(f[None] for f in vars(fields).values()))
    kept_one = None if kept is None else kept[None]
    codes = columns_triton.sweep(
        moved[0][None],
        on_device[None],
        moved[1][None],
        one,
        moved[2][None],
        causal=causal,
        keep=kept_one,
    )[0].cpu()
    # two of them at once
    twice = torch.stack([error_at_start] * 2).to("cuda")
    both = columns_triton.sweep(
        torch.stack([moved[0]] * 2), twice, torch.stack([moved[1]] * 2),
        Grid(*(torch.stack([f] * 2) for f in vars(fields).values())), torch.stack([moved[2]] * 2),
        causal=causal, keep=None if kept is None else torch.stack([kept] * 2),
    )  # fmt: skip
    assert torch.equal(both.cpu(), torch.stack([codes] * 2)) and torch.equal(
        twice, torch.stack([on_device] * 2)
    )
    # sums in another order may tip a weight that lies midway between two codes, and with it the
    # rest of its row
    assert (codes != expected).any(1).float().mean() < 0.1
    same = (codes == expected).all(1)
    torch.testing.assert_close(on_device.cpu()[same], error[same], rtol=1e-4, atol=1e-4)


@pytest.mark.cuda
def test_a_row_is_rounded_alike_by_programs_of_few_and_of_many_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    random = torch.Generator("cuda").manual_seed(0)
    shape, panel = (1, 64, 2 * columns_triton.PANEL), columns_triton.PANEL
    weight = 0.02 * torch.randn(shape, generator=random, device="cuda")
    feedback = torch.randn(1, shape[2], shape[2], generator=random, device="cuda").triu(1) / panel
    group = (torch.arange(shape[2], device="cuda") // 64)[None]
    step = 0.004 + 0.002 * torch.rand(1, 64, 8, generator=random, device="cuda")
    grid = Grid(step, step / 3, torch.full_like(step, -8), torch.full_like(step, 7))
    found = []
    for many in (shape[1] + 1, shape[1]):
        monkeypatch.setattr(columns_triton, "MANY", many)
        error = torch.zeros_like(weight)
        found.append((columns_triton.sweep(weight, error, feedback, grid, group), error))
    (few, few_errors), (many_codes, many_errors) = found
    assert few.unique().numel() > 8
    assert torch.equal(few, many_codes) and torch.equal(few_errors, many_errors)


def sparsegpt_mask(weight: Tensor, hessian: Tensor, n: int, m: int) -> Tensor:
    """SparseGPT's n:m mask by optimal brain surgery, one column and one inverse at a time (section
    3.3): a column that is done leaves the problem, those after it hold what makes up for it.
    """
    weight, keep = weight.clone(), torch.zeros_like(weight, dtype=torch.bool)
    inverses = [torch.linalg.inv(hessian[k:, k:]) for k in range(len(hessian))]
    cost = torch.stack([inverse[0, 0] for inverse in inverses])
    for k, inverse in enumerate(inverses):
        if k % m == 0:
            score = weight[:, k : k + m].square() / cost[k : k + m]
            keep[:, k : k + m].scatter_(1, score.topk(n).indices, True)
        error = torch.where(keep[:, k], 0.0, weight[:, k]) / inverse[0, 0]
        weight[:, k:] -= torch.outer(error, inverse[0])
    return keep


@pytest.mark.parametrize("panel", [8, 32, 64])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
def test_the_mask_is_that_of_sparsegpt(
    n: int, m: int, panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparsegpt, "PANEL", panel)
    weight, hessian = correlated(32, 64)
    factor = Factor(hessian.clone(), 0.0)
    found = sparsegpt.prune(weight, factor.feedback, factor.cost, (n, m))
    assert torch.equal(found, sparsegpt_mask(weight, hessian, n, m))


def test_what_is_pruned_costs_least_and_later_columns_make_up_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SparseGPT by hand: of four columns the two of largest t^2 D stay, and later ones hear how far
    each is off.
    """
    target = torch.tensor([[1.0, 1.1, 1.2, 0.1, 1.2, 0.01, 1.0, 0.5, 1.0, 0.9, 0.8, 0.1]])
    cost = torch.tensor([4.0, 0.01, *[1.0] * 10])
    alone = sparsegpt.prune(target, torch.zeros(12, 12), cost, (2, 4))
    assert alone.nonzero()[:, 1].tolist() == [0, 2, 4, 6, 8, 9]
    feedback = torch.zeros(12, 12)
    feedback[1, 5] = 5.0  # of column 1, which is pruned
    feedback[5, 10] = -1.0  # of column 5, which stays, but 5.5 above its target
    for panel in (4, 8, 12):
        monkeypatch.setattr(sparsegpt, "PANEL", panel)
        heard = sparsegpt.prune(target, feedback, cost, (2, 4))
        assert heard.nonzero()[:, 1].tolist() == [0, 2, 4, 5, 8, 10]
