"""The integer product behind every reference: exact, whatever the CPU computes it with."""

import pytest
import torch

from qtool.schemes import base


@pytest.mark.parametrize("vnni", [False, True])
@pytest.mark.parametrize("k", [64, 1024, 1025, 5000])
def test_products_of_int8_are_added_exactly(vnni: bool, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_has_vnni", lambda: vnni)
    random = torch.Generator().manual_seed(k)
    a, b = (torch.randint(-128, 128, (n, k), generator=random, dtype=torch.int8) for n in (5, 7))
    a[0], b[0] = -128, -128  # the largest sum there is
    a[1:] = torch.randint(120, 128, (4, k), generator=random)  # and large ones of every kind
    b[1:] = torch.randint(120, 128, (6, k), generator=random)
    found = base.int_matmul(a, b)
    assert found.dtype == torch.int32
    assert torch.equal(found, a.to(torch.int32) @ b.to(torch.int32).t())
