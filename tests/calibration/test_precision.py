"""Rows in units: a row is the same whoever has the others, to the bit."""

import pytest
import torch

from qtool.calibration.precision import COLUMNS, ROWS, by_rows, product
from qtool.calibration.rounding.gptq.hessian import Hessian
from qtool.calibration.rounding.gptq.rounding import Gptq
from qtool.schemes import get
from tests.calibration.conftest import solve


def test_on_cpu_it_is_the_product() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 2)
    assert torch.equal(product(a, b), a @ b)
    assert torch.equal(by_rows(lambda part: part.square(), a), a.square())


@pytest.mark.cuda
@pytest.mark.parametrize("columns", [300, COLUMNS, COLUMNS + 300])
def test_a_product_is_precise_and_of_any_width(columns: int) -> None:
    a, b = torch.randn(2 * ROWS, 700, device="cuda"), torch.randn(700, columns, device="cuda")
    exact, found = a.double() @ b.double(), product(a, b)
    assert (found.double() - exact).norm() < 2e-6 * exact.norm()
    assert torch.equal(product(a[ROWS:], b), found[ROWS:])


@pytest.mark.cuda
@pytest.mark.parametrize("options", [{"residual": 0, "rounds": 0}, {}], ids=["plain", "default"])
def test_gptq_of_some_rows_is_that_of_all(options: dict[str, float]) -> None:
    torch.manual_seed(0)
    x = torch.randn(8192, 1024, device="cuda", dtype=torch.bfloat16)
    hessian = Hessian(1024, x.device, drift=True)
    hessian.add(x, 1.02 * x)
    hessian.complete()
    weight, scheme = torch.randn(4 * ROWS, 1024, device="cuda"), get("w4a8-lqq", 64)
    whole = solve(Gptq(**options), scheme, weight, hessian)[0]  # type: ignore[arg-type]
    for parts in (2, 4):
        codes = [solve(Gptq(**options), scheme, part, hessian)[0] for part in weight.chunk(parts)]  # type: ignore[arg-type]
        assert torch.equal(torch.cat(codes), whole)
