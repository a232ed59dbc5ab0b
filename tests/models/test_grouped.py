"""Linears of many experts as one product: in one launch, by rows, and where they cannot be one."""

import pytest
import torch
from torch import nn

from qtool.calibration.rounding.rounded import Rounded, SimulatedLinear
from qtool.models import grouped
from qtool.models.grouped import as_read, grouped_linear, segments, shared_reading, stacked
from qtool.schemes import get
from qtool.schemes.arithmetic.activation import PER_TOKEN_S8, UNQUANTIZED
from qtool.schemes.arithmetic.online_hadamard import rotate_fast, rotate_input

COUNTS = [3, 0, 5, 1]


@pytest.fixture
def linears() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(16, 24, dtype=torch.bfloat16) for _ in COUNTS]


def apart(linears: list[nn.Linear], x: torch.Tensor) -> torch.Tensor:
    return torch.cat([own(part) for own, part in zip(linears, segments(x, COUNTS), strict=True)])


@torch.no_grad()
@pytest.mark.parametrize("transposed", [False, True])
def test_one_launch_multiplies_as_each_linear_does(linears, transposed, monkeypatch):
    """By the CPU's grouped matmul, which takes what a GPU's takes."""
    monkeypatch.setattr(grouped, "runs_grouped", lambda x, weight: True)
    if transposed:  # a stack of inputs before outputs, as GPT-OSS has
        whole = torch.stack([linear.weight.mT.contiguous() for linear in linears])
        for linear, own in zip(linears, whole, strict=True):
            linear.weight = nn.Parameter(own.mT)
    x = torch.randn(sum(COUNTS), 16, dtype=torch.bfloat16)
    expected = apart(linears, x)
    found = grouped_linear(linears, x, segments(x, COUNTS))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)  # the bias is added later
    if transposed:
        assert linears[0].weight.data_ptr() == whole.data_ptr()


@torch.no_grad()
@pytest.mark.cuda
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gpu_multiplies_all_experts_in_one_launch(linears, transposed):
    linears = [linear.cuda() for linear in linears]
    if transposed:
        whole = torch.stack([linear.weight.mT.contiguous() for linear in linears])
        for linear, own in zip(linears, whole, strict=True):
            linear.weight = nn.Parameter(own.mT)
    for counts in (COUNTS, [0, 0, 9, 0], [300, 1, 0, 77]):
        x = torch.randn(sum(counts), 16, dtype=torch.bfloat16, device="cuda")
        assert grouped.runs_grouped(x, linears[0].weight)
        parts = segments(x, counts)
        expected = torch.cat([own(part) for own, part in zip(linears, parts, strict=True)])
        found = grouped_linear(linears, x, parts)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_weights_become_parts_of_one_tensor_once(linears):
    expected = torch.stack([linear.weight.detach() for linear in linears])
    stack = stacked(linears)
    assert torch.equal(stack, expected)
    assert stacked(linears).data_ptr() == stack.data_ptr() == linears[0].weight.data_ptr()
    with torch.no_grad():
        linears[2].weight += 1
    assert torch.equal(stack[2], expected[2] + 1)
    linears[1].weight = nn.Parameter(expected[1])  # a rounded one took its place
    assert torch.equal(stacked(linears)[2], expected[2] + 1)
    gate = torch.randn(4, 16, 48).mT[:, ::2]  # neither rows nor columns lie together (GPT-OSS)
    for linear, own in zip(linears, gate, strict=True):
        linear.weight = nn.Parameter(own)
    assert stacked(linears).is_contiguous()


@torch.no_grad()
def test_a_linear_that_is_looked_at_is_called_with_its_rows(linears):
    x, seen = torch.randn(sum(COUNTS), 16, dtype=torch.bfloat16), []
    expected = apart(linears, x)
    assert torch.equal(grouped_linear(linears, x, segments(x, COUNTS)), expected)
    assert shared_reading(linears) == (UNQUANTIZED, False)
    linears[2].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    assert shared_reading(linears) is None
    assert torch.equal(grouped_linear(linears, x, segments(x, COUNTS)), expected)
    assert torch.equal(torch.cat(seen), x[3:8])


@torch.no_grad()
@pytest.mark.parametrize("rounded", [False, True])
def test_linears_that_rotate_are_one_product_too(rounded, monkeypatch):
    """Before they are rounded, by a hook, and after."""
    linears, w8a8 = [nn.Linear(64, 24, dtype=torch.bfloat16) for _ in COUNTS], get("w8a8")
    if rounded:
        params = [w8a8.fit(one.weight.float()) for one in linears]
        codes = [w8a8.quantize(one.weight, p) for one, p in zip(linears, params, strict=True)]
        linears = [
            SimulatedLinear(one, w8a8, Rounded(c, p), one.weight, rotated=True)
            for one, c, p in zip(linears, codes, params, strict=True)
        ]
    else:
        for linear in linears:
            linear.register_forward_pre_hook(rotate_input)
    assert shared_reading(linears) == (PER_TOKEN_S8 if rounded else UNQUANTIZED, True)
    x = torch.randn(sum(COUNTS), 64, dtype=torch.bfloat16)
    expected = apart(linears, x)
    for at_once in (False, True):
        monkeypatch.setattr(grouped, "runs_grouped", lambda x, weight, at_once=at_once: at_once)
        found = grouped_linear(linears, x, segments(x, COUNTS))
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_inputs_are_seen_as_hooks_rotate_them():
    linears, x = [nn.Linear(64, 24) for _ in COUNTS], torch.randn(sum(COUNTS), 64)
    assert as_read(linears, x, COUNTS) is x
    for number in (1, 2):
        linears[number].register_forward_pre_hook(rotate_input)
    expected = torch.cat([x[:3], rotate_fast(x[3:8]), x[8:]])
    assert torch.equal(as_read(linears, x, COUNTS), expected)


@torch.no_grad()
def test_no_tokens_give_no_outputs(linears):
    x = torch.randn(0, 16, dtype=torch.bfloat16)
    assert grouped_linear(linears, x, segments(x, [0] * 4)).shape == (0, 24)
