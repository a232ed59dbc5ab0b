"""The products behind every reference: integers exact however they are computed, floats as the
kernels round.
"""

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from qtool.schemes.arithmetic import products


@pytest.mark.parametrize("vnni", [False, True])
@pytest.mark.parametrize("k", [64, 1024, 1025, 5000])
def test_products_of_int8_are_added_exactly(
    vnni: bool, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_has_vnni", lambda: vnni)
    random = torch.Generator().manual_seed(k)
    a, b = (torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8) for n in (5, 7))
    a[0], b[0] = -128, -128  # the largest sum there is
    a[1:] = torch.randint(120, 128, (4, k), generator=random)  # and large ones of every kind
    b[1:] = torch.randint(120, 128, (6, k), generator=random)
    found = products.int_matmul(a, b)
    assert found.dtype == torch.int32
    assert torch.equal(found, a.to(torch.int32) @ b.to(torch.int32).t())


def exact_fma(a: float, b: float, c: float) -> float:
    """In rational numbers, rounded once to float32."""
    return float(np.float32(float(Fraction(a) * Fraction(b) + Fraction(c))))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [32, 128, 256, None])
def test_groups_are_added_as_a_kernel_adds_them(size: int | None, bias: bool) -> None:
    """In the order of the inputs, 128 of them at most at a time, each sum scaled by the token, then
    by one fma.
    """
    random = torch.Generator().manual_seed(0)
    m, n, k = 3, 4, 512
    qx, qw = (
        torch.randint(-8, 8, (rows, k), generator=random, dtype=torch.int8) for rows in (m, n)
    )
    sx, sw = (torch.rand(rows, k // (size or k), generator=random) for rows in (m, n))
    b = torch.randn(n, generator=random) if bias else None
    found = products.group_matmul(qx, sx, qw, sw, size, b)
    step, want = min(size, 128) if size else k, torch.empty(m, n)
    for i in range(m):
        for j in range(n):
            total = 0.0
            for at in range(0, k, step):
                group, some = at // (size or k), slice(at, at + step)
                scaled = np.float32(int(qx[i, some].int() @ qw[j, some].int())) * np.float32(
                    sx[i, group]
                )
                # a whole channel's is the epilogue
                addend = float(b[j]) if b is not None and size is None else total
                total = exact_fma(float(scaled), float(sw[j, group]), addend)
            want[i, j] = total if b is None or size is None else exact_fma(total, 1.0, float(b[j]))
    assert torch.equal(found, want)


def test_rows_are_independent(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    qx, qw = (
        torch.randint(-8, 8, (rows, 256), generator=random, dtype=torch.int8) for rows in (9, 5)
    )
    sx, sw = torch.rand(9, 2, generator=random), torch.rand(5, 2, generator=random)

    def product() -> Tensor:
        return products.group_matmul(qx, sx, qw, sw, 128, None)

    whole = product()
    monkeypatch.setattr(products, "ROWS", 4)
    assert torch.equal(product(), whole)
