"""The fused straight-through estimator against torch's own operations, on a GPU."""

import pytest
import torch

from qtool.calibration.rounding.distill import straight_through_triton as fused
from qtool.calibration.rounding.distill.learned_linear import StraightThrough
from qtool.schemes import get


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "k"), [("w4a8-lqq", 384), ("w4a16", 256), ("w4a8-qoq", 1536), ("w4a16-24", 256)]
)
def test_one_kernel_each_way_does_what_torch_does(name: str, k: int) -> None:
    scheme, weight = get(name), torch.randn(5, k)
    params = scheme.fit(weight, group_clip=0.7)
    grid, groups = scheme.grid(params), scheme.groups(1.3 * weight)
    keep = None if scheme.sparsity is None else torch.rand_like(groups) < 0.5
    gradient = torch.randn_like(groups)
    per_group = (torch.full(groups.shape[:2], x, requires_grad=True) for x in (1.0, 0.0))
    step = grid.step[..., None] * 2.0
    steps = (groups / step).requires_grad_()
    learned = [steps, *per_group]
    value = StraightThrough.apply(steps, step, *learned[1:], keep, grid, torch.float32)
    value.backward(gradient.flatten(1))
    moved = [None if t is None else t.to("cuda") for t in (steps.detach(), step, keep, gradient)]
    there = type(grid)(*(t.to("cuda") for t in (grid.step, grid.offset, grid.low, grid.high)))
    assert torch.equal(fused.value(*moved[:2], there, torch.float32).cpu().flatten(1), value)
    assert torch.equal(fused.value(*moved[:2], there, torch.float16).cpu().flatten(1), value.half())
    to_steps, *others = (t.cpu() for t in fused.gradients(*moved, there))
    assert torch.equal(to_steps, steps.grad)
    assert 0 < int((to_steps == 0).sum()) < to_steps.numel()
    for ours, theirs in zip(others, learned[1:], strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-5, atol=1e-4)
