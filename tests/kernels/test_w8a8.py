"""The W8A8 op on a CPU."""

import pytest
import torch

from qtool import schemes
from qtool.errors import QtoolError
from qtool.kernels.hopper.w8a8 import w8a8_gemm


def test_is_the_schemes_matmul_and_passes_opcheck() -> None:
    scheme = schemes.get("w8a8", None)
    weight, x = torch.randn(128, 192), torch.randn(7, 192)
    params = scheme.fit(weight)
    codes = scheme.quantize(weight, params)
    qx, sx = scheme.activation.quantize(x)
    arguments = (qx, sx[:, 0].contiguous(), codes, params["scale"].flatten(), None, torch.float32)
    torch.testing.assert_close(w8a8_gemm(*arguments), scheme.matmul(x, codes, params))
    torch.library.opcheck(w8a8_gemm, arguments)


def test_refuses_in_one_sentence() -> None:
    x = torch.zeros(4, 128, dtype=torch.int8)
    weight = torch.zeros(96, 128, dtype=torch.int8)
    one = torch.ones(4)
    with pytest.raises(QtoolError, match="N and K must be multiples of 64"):
        w8a8_gemm(x, one, weight, torch.ones(96), None, torch.bfloat16)
    with pytest.raises(QtoolError, match=r"scale has shape \(9,\)"):
        w8a8_gemm(x, one, weight[:64], torch.ones(9), None, torch.bfloat16)


def test_refuses_more_channels_than_an_int32_can_add() -> None:
    x = torch.full((1, 1 << 17), -128, dtype=torch.int8)
    weight, one = x.expand(64, -1).contiguous(), torch.ones(1)
    with pytest.raises(QtoolError, match=r"\(64, 131072\); .* multiples of 64, K at most 65536"):
        w8a8_gemm(x, one, weight, torch.ones(64), None, torch.int32)
    half, sums = weight[:, : 1 << 16].contiguous(), torch.full((1, 64), 1 << 30)
    found = w8a8_gemm(half[:1], one, half, torch.ones(64), None, torch.int32)
    assert torch.equal(found, sums.int())
