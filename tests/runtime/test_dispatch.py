"""The kernels' CPU references behind the dispatch equal the schemes' own arithmetic; on a GPU the
kernels do.
"""

from dataclasses import replace

import pytest
import torch

from qtool.format import LinearFormat
from qtool.kernels.dtypes import HALF
from qtool.pipeline import verify
from qtool.runtime.dispatch import KERNELS, Kernel, kernel_for
from qtool.schemes.arithmetic.online_hadamard import rotate
from tests.runtime.test_linear import quantized

EACH = [(*key, kernel) for key, kernels in KERNELS.items() for kernel in kernels]


def inputs(kernel: Kernel) -> torch.Tensor:
    torch.manual_seed(2)
    return torch.randn(7, 256).to(
        torch.float32 if torch.float32 in kernel.dtypes else torch.bfloat16
    )


@pytest.mark.parametrize(("scheme", "layout", "kernel"), EACH)
@pytest.mark.parametrize("permuted", [False, True])
def test_kernel_references_are_the_schemes(
    scheme: str, layout: str, kernel: Kernel, permuted: bool
) -> None:
    torch.manual_seed(1)
    linear, x = quantized(scheme, layout, torch.randn(128, 256), permuted=permuted), inputs(kernel)
    if permuted:
        linear.permutation.copy_(torch.randperm(256))  # type: ignore[union-attr]
    y, expected = linear.multiply(x, kernel, torch.float32), linear.reference(x)
    assert (y - expected).norm() <= kernel.tolerance * expected.norm()


@pytest.mark.parametrize(("scheme", "layout", "kernel"), EACH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel_references_rotate_as_the_schemes_do(
    scheme: str, layout: str, kernel: Kernel, dtype: torch.dtype
) -> None:
    """16 bits alone round a rotated input, where a kernel takes nothing else."""
    if dtype not in kernel.dtypes:
        pytest.skip(f"{kernel.name} takes 16 bits")
    torch.manual_seed(1)
    linear = quantized(scheme, layout, torch.randn(128, 256), permuted=True)
    linear.format = replace(linear.format, rotated=True)
    order = torch.randperm(256)
    linear.permutation.copy_(order)  # type: ignore[union-attr]
    x = torch.randn(7, 256).to(dtype)
    rotated = rotate(x[:, order])
    if kernel.dtypes == HALF:
        rotated = rotated.to(dtype)
    kind, (codes, params) = linear.format.scheme_object, linear.unpack()
    expected = kind.matmul(rotated, codes, params, linear.bias)
    y = linear.multiply(x, kernel, torch.float32)
    assert (y - expected).norm() <= kernel.tolerance * expected.norm()
    if dtype == inputs(kernel).dtype:  # what `qtool verify` gives it
        checked = verify._reference(linear, x, codes, params)
        assert (y - checked).norm() <= kernel.tolerance * checked.norm()


@pytest.mark.parametrize(("scheme", "layout", "kernel"), EACH)
def test_a_kernel_takes_the_longest_rows_of_known_models(
    scheme: str, layout: str, kernel: Kernel
) -> None:
    k, n = 59392, 128  # of Falcon 180B
    assert kernel.accepts(n, k, torch.bfloat16, min(kernel.capabilities))
    torch.manual_seed(1)
    linear, x = quantized(scheme, layout, torch.randn(n, k)), torch.randn(2, k).bfloat16()
    y, expected = linear.multiply(x, kernel, torch.float32), linear.reference(x)
    assert (y - expected).norm() <= kernel.tolerance * expected.norm()


def test_the_cpu_runs_the_reference() -> None:
    linear_format = LinearFormat("w4a8-lqq", 64, "dual-mma")
    assert kernel_for(linear_format, 128, 128, torch.device("cpu"), torch.float32) is None


@pytest.mark.cuda
@pytest.mark.parametrize(("scheme", "layout", "kernel"), EACH)
def test_kernels_run_packed_linears(scheme: str, layout: str, kernel: Kernel) -> None:
    if torch.cuda.get_device_capability() not in kernel.capabilities:
        pytest.skip(f"{kernel.name} is not for this GPU")
    torch.manual_seed(1)
    linear, x = quantized(scheme, layout, torch.randn(128, 256)), inputs(kernel)
    expected = linear.reference(x)
    found = linear.cuda().multiply(x.cuda(), kernel, torch.float32).cpu()
    assert (found - expected).norm() <= kernel.tolerance * expected.norm()
