"""A residual's addition, RMSNorm and quantization as one operation: the three of the model."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from qtool.errors import QtoolError
from qtool.kernels.activation.quantize_activation import quantize_activation
from qtool.kernels.activation.quantize_residual_norm import quantize_residual_norm

EPSILON = 1e-5
gpu = pytest.param("cuda", marks=pytest.mark.cuda)


def unfused(x: Tensor, residual: Tensor | None, norm: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's definition of ``rms_norm`` and ``fused_add_rms_norm``: the norm, and the sum."""
    wide = x.float() if residual is None else x.float() + residual.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
    return normalized.to(x.dtype) * norm, wide.to(x.dtype)


def exact(m: int, k: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rows whose squares have an exact sum in float32, in whatever order; and a weight."""
    random = torch.Generator().manual_seed(k)
    x, residual = torch.randint(-8, 9, (2, m, k), generator=random) / 8
    norm = torch.rand(k, generator=random) + 0.5
    return tuple(tensor.to(device, dtype) for tensor in (x, residual, norm))  # type: ignore[return-value]


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("k", [64, 4096, 16384])
@pytest.mark.parametrize("gather", [False, True])
def test_is_the_unfused_model(device: str, dtype: torch.dtype, k: int, gather: bool) -> None:
    """fused == quantize_activation(reference_norm_in_16bit), and the residual goes on."""
    x, residual, norm = exact(5, k, dtype, device)
    order = torch.randperm(k, dtype=torch.int32, device=device) if gather else None
    y, added = unfused(x, residual, norm)
    *codes, got = quantize_residual_norm(x, residual, order, norm, EPSILON)
    assert torch.equal(got, added)
    for a, b in zip(codes, quantize_activation(y, order, None, "none", 0.0), strict=True):
        assert torch.equal(a, b)
    y, _ = unfused(x, None, norm)
    for a, b in zip(
        quantize_activation(x, order, norm, "rms-norm", EPSILON),
        quantize_activation(y, order, None, "none", 0.0),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [64, 14336])
def test_silu_is_the_unfused_model(device: str, dtype: torch.dtype, k: int) -> None:
    x = torch.randn(5, 2 * k, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    gate, up = x.chunk(2, -1)
    got = quantize_activation(x, None, None, "silu-up", 0.0)
    want = quantize_activation(silu(gate) * up, None, None, "none", 0.0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("device", ["cpu", gpu])
@pytest.mark.parametrize("m, k", [(1, 4096), (64, 4096), (257, 14336), (40, 14336), (3, 32768)])
def test_any_rows_within_the_order_of_a_sum(device: str, m: int, k: int) -> None:
    """The sum of squares may round otherwise; a flipped rounding moves a code by one."""
    random = torch.Generator().manual_seed(k)
    x, residual = torch.randn(2, m, k, generator=random).to(device, torch.bfloat16)
    norm = torch.rand(k, generator=random).to(device, torch.bfloat16)
    y, added = unfused(x, residual, norm)
    codes, scale, total, got = quantize_residual_norm(x, residual, None, norm, EPSILON)
    want, want_scale, _ = quantize_activation(y, None, None, "none", 0.0)
    assert torch.equal(got, added) and torch.equal(total, codes.sum(1, dtype=torch.int32))
    torch.testing.assert_close(scale, want_scale, rtol=2**-7, atol=0)
    same = scale == want_scale
    assert same.float().mean() > 0.9
    away = (codes[same].int() - want[same].int()).abs()
    assert away.max() <= 1 and away.float().mean() < 1e-3


@pytest.mark.parametrize("order", [False, True])
def test_opcheck(order: bool) -> None:
    permutation = torch.randperm(64).int() if order else None
    given = torch.randn(3, 64), torch.randn(3, 64), permutation, torch.ones(64), 1e-6
    torch.library.opcheck(quantize_residual_norm, given)


def test_refuses_in_one_sentence() -> None:
    x, norm = torch.randn(2, 64), torch.ones(64)
    with pytest.raises(QtoolError, match=r"residual has shape \(2, 32\)"):
        quantize_residual_norm(x, x[:, :32].contiguous(), None, norm, EPSILON)
    with pytest.raises(QtoolError, match="residual is torch"):
        quantize_residual_norm(x, x.bfloat16(), None, norm, EPSILON)
    with pytest.raises(QtoolError, match="quantize_residual_norm: norm has shape"):
        quantize_residual_norm(x, x, None, norm[:32], EPSILON)
