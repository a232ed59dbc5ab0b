"""Second moments: the sum of batches, both triangles, whatever computes them; the factor is that of
the damped sum.
"""

from functools import partial

import pytest
import torch

from qtool import schemes
from qtool.calibration.precision import halves, precise_matmul
from qtool.calibration.rounding.gptq.clip_search import group_error
from qtool.calibration.rounding.gptq.factor import Factor
from qtool.calibration.rounding.gptq.gptq import gptq
from qtool.calibration.rounding.gptq.hessian import Hessian, panels
from qtool.errors import QtoolError


@pytest.mark.parametrize("k", [64, 512, 700, 4096, 14336])
def test_panels_cover_the_upper_triangle_once(k: int) -> None:
    columns = torch.zeros(k, dtype=torch.long)
    for rows, part in panels(k):
        assert rows == slice(0, part.stop)
        columns[part] += 1
    assert (columns == 1).all()


def test_batches_add_up() -> None:
    x = torch.randn(48, 24)
    whole, parts = Hessian(24, x.device), Hessian(24, x.device)
    whole.add(x)
    for part in x.split(20):
        parts.add(part)
    torch.testing.assert_close(parts.complete().h, whole.complete().h)
    torch.testing.assert_close(whole.h, 2 * x.T @ x)
    assert parts.tokens == whole.tokens == 48


def test_a_tokens_share_may_have_a_square_below_float16() -> None:
    share = torch.tensor([[1.0], [1e-4], [1.0]])
    x = (torch.randn(3, 16) / share).clamp(-6e4, 6e4).half()
    reference, lacking = x * 1.5, torch.randn(3, 5) / share
    found = Hessian(16, x.device, drift=True, hidden=5)
    found.add(x, reference, lacking, share)
    found.complete()
    counted, close = x * share, partial(torch.testing.assert_close, rtol=1e-2, atol=1e-2)
    close(found.h, 2 * counted.T @ counted)
    assert found.d is not None and found.s is not None
    close(found.d, 2 * ((reference - x) * share).T @ counted)
    close(found.s, 2 * (lacking * share).T @ counted)


@pytest.mark.parametrize("k", [64, 700, 1300])
def test_panels_are_put_together_again(k: int) -> None:
    x, reference, lacking = torch.randn(30, k), torch.randn(30, k), torch.randn(30, 7)
    found = Hessian(k, x.device, drift=True, hidden=7)
    for rows in (slice(0, 11), slice(11, 30)):
        found.add(x[rows], reference[rows], lacking[rows])
        found.step()
    found.complete()
    close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-4)
    close(found.h, 2 * x.T @ x)
    assert torch.equal(found.h[:512, 512:], found.h[512:, :512].T)
    close(found.d, 2 * (reference - x).T @ x)
    close(found.s, 2 * lacking.T @ x)


def test_the_factor_is_of_the_damped_hessian() -> None:
    x = torch.randn(96, 32)
    exact = x.T @ x
    factor = Factor(exact.clone(), 0.1)
    damped = exact + 0.1 * exact.diagonal().mean() * torch.eye(32)
    torch.testing.assert_close(factor.h, damped)
    upper = (factor.feedback + torch.eye(32)) * factor.cost.sqrt()
    assert torch.equal(factor.feedback.triu(1), factor.feedback)
    torch.testing.assert_close(upper @ upper.T, damped, rtol=1e-4, atol=1e-3)
    order = torch.randperm(32)
    torch.testing.assert_close(
        Factor(exact, 0.1, order).feedback, Factor(exact[order][:, order], 0.1).feedback
    )
    right = torch.randn(5, 32)
    torch.testing.assert_close(factor.solve(right) @ damped, right, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("column", [3, 5])
def test_a_hessian_that_holds_no_numbers_has_no_factor(bad: float, column: int) -> None:
    hessian = torch.eye(8)
    hessian[3, column] = hessian[column, 3] = bad
    with pytest.raises(QtoolError, match=r"inputs .* are NaN or beyond float32's range"):
        Factor(hessian, 0.1)


@pytest.mark.parametrize("largest", [1e38, 1e39])
def test_squares_beyond_float32_are_named(largest: float) -> None:
    """Those of 32 channels fit float32 one by one, or not even so."""
    inputs = torch.eye(32) * (largest / 2) ** 0.5
    with pytest.raises(QtoolError, match=r"inputs .* are NaN or beyond float32's range"):
        gptq(torch.randn(4, 32), schemes.get("w4a16", 32), inputs=inputs)


@pytest.mark.cuda
@pytest.mark.parametrize("k", [256, 1400])
@pytest.mark.parametrize("drift", [False, True])
def test_tensor_cores_give_the_float32_sums(k: int, drift: bool) -> None:
    hessian = Hessian(k, torch.device("cuda"), drift)
    expected, expected_d = (torch.zeros(k, k, dtype=torch.float64) for _ in range(2))
    for tokens in (100, 333):
        x = torch.randn(tokens, k, device="cuda").bfloat16()
        reference = x + (torch.randn_like(x) / 8)
        hessian.add(x, reference if drift else None)
        exact = x.double().cpu()
        expected += 2 * exact.T @ exact
        expected_d += 2 * (reference - x).double().cpu().T @ exact
    hessian.complete()
    assert (
        torch.equal(hessian.h, hessian.h.T)
        or (hessian.h - hessian.h.T).norm() < 1e-6 * hessian.h.norm()
    )
    assert (hessian.h.double().cpu() - expected).norm() < 1e-6 * expected.norm()
    if hessian.d is not None:
        assert (hessian.d.double().cpu() - expected_d).norm() < 1e-5 * expected_d.norm()


@pytest.mark.cuda
@pytest.mark.parametrize(("n", "groups", "size"), [(40, 4, 64), (7, 1, 1500), (3, 2, 128)])
def test_the_fused_group_error_is_torchs(n: int, groups: int, size: int) -> None:
    from qtool.calibration.rounding.gptq import group_error_triton
    from qtool.schemes import get

    scheme = get("w4a8-qoq")
    weight = torch.randn(n * groups, size, device="cuda")
    grid = scheme.grid(scheme.fit(weight, clip=0.7))
    by_group = type(grid)(*(field.view(n, groups).contiguous() for field in vars(grid).values()))
    shaped, importance = weight.view(n, groups, size), torch.rand(1, groups, size, device="cuda")
    found = group_error_triton.group_error(shaped, importance, by_group)
    torch.testing.assert_close(
        found, group_error(shaped, importance, by_group), rtol=1e-4, atol=1e-6
    )
    wide = type(grid)(by_group.step * 1.1, by_group.offset, by_group.low, by_group.high)
    both = type(grid)(
        *(
            torch.cat(pair)
            for pair in zip(vars(wide).values(), vars(by_group).values(), strict=True)
        )
    )
    expected = torch.cat([group_error_triton.group_error(shaped, importance, wide), found])
    assert torch.equal(group_error_triton.group_error(shaped, importance, both), expected)
    # two weights, each with an importance of its own, and both candidates of each
    two, its_own = torch.cat([shaped, shaped]), torch.cat([importance, importance.flip(1, 2)])
    of_two = type(grid)(
        *(t.view(2, n, groups).repeat_interleave(2, 0).flatten(0, 1) for t in vars(both).values())
    )
    other = group_error_triton.group_error(shaped, importance.flip(1, 2), both)
    pairs = zip(expected.split(n), other.split(n), strict=True)
    whole = group_error_triton.group_error(two, its_own, of_two)
    assert torch.equal(whole, torch.cat([error for pair in pairs for error in pair]))


def test_halves_are_the_whole_and_fit_tf32() -> None:
    x = torch.randn(1000) * torch.logspace(-20, 20, 1000)
    high, low = halves(x)
    assert torch.equal(high + low, x)
    assert (low.abs() <= 2.0**-10 * x.abs()).all()
    mantissa, _ = torch.frexp(high)
    assert torch.equal(mantissa * 2**11, (mantissa * 2**11).round())


@pytest.mark.cuda
def test_products_in_three_parts_are_nearly_as_precise_as_float32() -> None:
    a, b = torch.randn(200, 3000, device="cuda"), torch.randn(3000, 100, device="cuda")
    exact = a.double() @ b.double()

    def off(found: torch.Tensor) -> float:
        return float((found.double() - exact).norm() / exact.norm())

    # tensor cores add a little less precisely; TF32 is 1000 times off
    assert off(precise_matmul(a, b)) < 5 * off(a @ b)
    hessian = Hessian(3000, a.device)
    hessian.h = b @ b.T
    expected = ((a.double() @ b.double()) ** 2).sum(1)
    torch.testing.assert_close(hessian.power(a).double(), expected, rtol=1e-5, atol=0)
