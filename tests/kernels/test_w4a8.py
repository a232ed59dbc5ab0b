"""The W4A8 op on a CPU: equal to the schemes' arithmetic, honest about its inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.kernels.hopper.w4a8 import w4a8_gemm

Case = tuple[str, int | None]
Make = Callable[..., tuple[dict[str, Any], Tensor]]


def test_is_the_schemes_matmul(w4a8_case: Case, w4a8_arguments: Make) -> None:
    given, want = w4a8_arguments(*w4a8_case)
    torch.testing.assert_close(w4a8_gemm(**given), want, rtol=1e-6, atol=0)


def test_int32_sums_and_bias(w4a8_arguments: Make) -> None:
    given, want = w4a8_arguments("w4a8-lqq", 64)
    sums = w4a8_gemm(**given | {"out_dtype": torch.int32})
    assert sums.dtype == torch.int32
    bias = torch.randn(128)
    torch.testing.assert_close(sums.float() * given["sx"][:, None] * given["s1"], want)
    torch.testing.assert_close(w4a8_gemm(**given | {"bias": bias}), want + bias)


def test_opcheck(w4a8_case: Case, w4a8_arguments: Make) -> None:
    given, _ = w4a8_arguments(*w4a8_case)
    torch.library.opcheck(w4a8_gemm, tuple(given.values()))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("scheme", "w4a8-lq", "did you mean w4a8-lqq"),
        ("group_size", 48, "no group size 48"),
        ("x", torch.zeros(5, 256), "x is torch.float32; expected torch.int8"),
        ("x", torch.zeros(5, 96, dtype=torch.int8), "K = 96 is not a multiple of 64"),
        ("x", torch.zeros(256, 5, dtype=torch.int8).t(), "must be contiguous"),
        ("sx", torch.zeros(4), r"sx has shape \(4,\); expected \(5,\)"),
        ("s2", None, "s2 is missing"),
        ("zero", torch.zeros(128, dtype=torch.uint8), "zero is given"),
        ("out_dtype", torch.float64, "out_dtype is torch.float64"),
        ("bias", torch.zeros(128, device="meta"), "must be on one device"),
    ],
)
def test_refuses_in_one_sentence(
    name: str, value: object, message: str, w4a8_arguments: Make
) -> None:
    given, _ = w4a8_arguments("w4a8-lqq", 64)
    with pytest.raises(QtoolError, match=message) as error:
        w4a8_gemm(**given | {name: value})
    assert "\n" not in str(error.value)
