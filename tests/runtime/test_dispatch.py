"""The kernels' CPU references behind the dispatch equal the schemes' own arithmetic; on a GPU the kernels do."""

import pytest
import torch

from qtool.runtime.dispatch import KERNELS, kernel_for
from qtool.runtime.format import LinearFormat
from tests.runtime.test_linear import quantized


@pytest.mark.parametrize(("scheme", "layout"), KERNELS)
@pytest.mark.parametrize("permuted", [False, True])
def test_kernel_references_are_the_schemes(scheme: str, layout: str, permuted: bool) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(128, 256), torch.randn(7, 256)
    linear = quantized(scheme, layout, weight, permuted=permuted)
    if permuted:
        linear.permutation.copy_(torch.randperm(256))  # type: ignore[union-attr]
    y = linear.multiply(x, KERNELS[scheme, layout], torch.float32)
    assert torch.allclose(y, linear.reference(x), rtol=1e-6, atol=1e-6)


def test_the_cpu_runs_the_reference() -> None:
    assert kernel_for(LinearFormat("w4a8-lqq", 64, "dual-mma"), 128, 128, torch.device("cpu")) is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("scheme", "layout"), KERNELS)
def test_kernels_run_packed_linears(scheme: str, layout: str) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(128, 256), torch.randn(7, 256)
    linear = quantized(scheme, layout, weight)
    expected = linear.reference(x)
    found = linear.cuda()(x.cuda()).cpu()
    assert (found - expected).norm() < 1e-6 * expected.norm()
