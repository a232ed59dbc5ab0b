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
