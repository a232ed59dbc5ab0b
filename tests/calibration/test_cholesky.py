"""The factor by panels is the library's, on any panel width; what has no factor is said to have none."""

import pytest
import torch

from qtool.calibration.cholesky import by_panels, cholesky


def definite(k: int, device: str = "cpu") -> torch.Tensor:
    x = torch.randn(3 * k, k, generator=torch.Generator().manual_seed(0)).to(device)
    return x.T @ x


@pytest.mark.parametrize("panel", [1, 7, 32, 64, 100])
def test_panels_give_the_librarys_factor(panel: int) -> None:
    matrix = definite(64)
    lower, failed = by_panels(matrix.clone(), panel)
    expected, _ = cholesky(matrix.clone())
    assert not failed and torch.equal(lower, lower.tril())
    torch.testing.assert_close(lower, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("where", [0, 10, 63])
@pytest.mark.parametrize("panel", [16, 64])
def test_what_is_not_positive_definite_has_none(where: int, panel: int) -> None:
    matrix = definite(64)
    matrix[where, where] = -1
    assert by_panels(matrix.clone(), panel)[1] and cholesky(matrix)[1]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_panels_on_a_gpu_are_as_precise_as_the_library() -> None:
    matrix = definite(5000, "cuda")
    exact = torch.linalg.cholesky(matrix.double())

    def off(lower: torch.Tensor) -> float:
        return float((lower.double() - exact).norm() / exact.norm())

    lower, failed = cholesky(matrix.clone())
    assert not failed and off(lower) < 2 * off(torch.linalg.cholesky(matrix))
