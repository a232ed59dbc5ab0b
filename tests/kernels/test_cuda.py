"""The kernels against the CPU reference, on a GPU. ``benchmarks/kernels/check.py`` does the same at
length.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.hopper.w4a8 import w4a8_gemm
from qtool.kernels.hopper.w8a8 import w8a8_gemm
from tests.conftest import on_hopper

Case = tuple[str, int | None]
Make = Callable[..., tuple[dict[str, Any], Tensor]]

pytestmark = [pytest.mark.cuda, on_hopper]


@pytest.mark.parametrize("m", [1, 8, 33, 130, 300])
def test_equals_the_cpu_reference(w4a8_case: Case, m: int, w4a8_arguments: Make) -> None:
    """To the bit, scales and bias included."""
    given, _ = w4a8_arguments(*w4a8_case, m=m, n=192, k=384)
    given["bias"] = torch.randn(192)
    there = {name: v.cuda() if isinstance(v, Tensor) else v for name, v in given.items()}
    for dtype in (torch.int32, torch.bfloat16, torch.float16, torch.float32):
        want = w4a8_gemm(**given | {"out_dtype": dtype})
        got = w4a8_gemm(**there | {"out_dtype": dtype}).cpu()
        assert torch.equal(got, want)


def test_opcheck_and_compile(w4a8_arguments: Make) -> None:
    given, _ = w4a8_arguments("w4a8-lqq", 64)
    there = tuple(v.cuda() if isinstance(v, Tensor) else v for v in given.values())
    torch.library.opcheck(w4a8_gemm, there)
    compiled = torch.compile(lambda *a: w4a8_gemm(*a) * 2, fullgraph=True)
    torch.testing.assert_close(compiled(*there), w4a8_gemm(*there) * 2)


@pytest.mark.parametrize("m", [1, 20, 200])
def test_w8a8_equals_the_cpu_reference(m: int) -> None:
    x = torch.randint(-127, 128, (m, 448), dtype=torch.int8)
    weight = torch.randint(-127, 128, (320, 448), dtype=torch.int8)
    arguments = (x, torch.rand(m), weight, torch.rand(320), torch.randn(320))
    there = tuple(v.cuda() for v in arguments)
    for dtype in (torch.int32, torch.float32):
        assert torch.equal(w8a8_gemm(*there, dtype).cpu(), w8a8_gemm(*arguments, dtype))


@pytest.mark.parametrize("k", [64, 4096, 14336, 59392])
def test_activation_quantization_equals_the_cpu(k: int) -> None:
    x, order = torch.randn(5, k).bfloat16(), torch.randperm(k).int()
    for rotated in (False, True):
        want = quantize_activation(x, order, None, "none", 0.0, rotated)
        got = quantize_activation(x.cuda(), order.cuda(), None, "none", 0.0, rotated)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))


def test_the_scale_of_a_token_is_never_subnormal() -> None:
    """The CPU reference raises it to 2**-126: a smaller one would have too few bits, or be 0."""
    x = torch.randn(5, 64) * 2.0 ** torch.tensor([[0], [-120], [-128], [-140], [-148]])
    want = quantize_activation(x, None, None, "none", 0.0)
    assert (want[1][2:] == 2.0**-126).all()
    got = quantize_activation(x.cuda(), None, None, "none", 0.0)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(got, want, strict=True))
