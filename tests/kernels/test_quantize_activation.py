"""Activation quantization on a CPU, fused and not."""

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.functional import silu

from qtool.errors import QtoolError
from qtool.kernels.activation.quantize_activation import QuantizeActivation, quantize_activation
from qtool.schemes.arithmetic.activation import PER_TOKEN_S8
from qtool.schemes.arithmetic.online_hadamard import rotate


def test_codes_scales_sums() -> None:
    x = torch.randn(6, 64)
    x[2] = 0
    codes, scale, total = quantize_activation(x, None, None, "none", 0.0)
    want_codes, want_scale = PER_TOKEN_S8.quantize(x)
    assert torch.equal(codes, want_codes) and torch.equal(scale, want_scale[:, 0])
    assert scale[2] == 1 and torch.equal(total, codes.sum(1, dtype=torch.int32))


def test_order_gathers_input_channels() -> None:
    x, order = torch.randn(3, 64), torch.randperm(64).int()
    gathered = quantize_activation(x, order, None, "none", 0.0)[0]
    assert torch.equal(
        gathered, quantize_activation(x, None, None, "none", 0.0)[0][:, order.long()]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_is_rotated_without_rounding(dtype: torch.dtype) -> None:
    x, order = torch.randn(3, 256).to(dtype), torch.randperm(128).int()
    gate, up = x.chunk(2, -1)
    found = quantize_activation(x, order, None, "silu-up", 0.0, True)
    codes, scale = PER_TOKEN_S8.quantize(rotate((silu(gate) * up)[:, order.long()]))
    assert torch.equal(found[0], codes) and torch.equal(found[1], scale[:, 0])


def test_fusions_are_the_unfused_model() -> None:
    x, norm = torch.randn(3, 64).bfloat16(), torch.rand(64).bfloat16()
    rms = torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-5).bfloat16() * norm
    fused = quantize_activation(x, None, norm, "rms-norm", 1e-5)
    assert (fused[0].int() - PER_TOKEN_S8.quantize(rms)[0].int()).abs().max() <= 1
    gate, up = x.chunk(2, -1)
    assert torch.equal(
        quantize_activation(x, None, None, "silu-up", 0.0)[0],
        PER_TOKEN_S8.quantize(silu(gate) * up)[0],
    )


@pytest.mark.parametrize(
    ("fusion", "norm", "order", "rotated"),
    [
        ("none", False, False, True),
        ("none", False, True, False),
        ("rms-norm", True, False, False),
        ("silu-up", False, True, True),
    ],
)
def test_opcheck(fusion: str, norm: bool, order: bool, rotated: bool) -> None:
    k = 64
    arguments = (
        torch.randn(3, 2 * k if fusion == "silu-up" else k),
        torch.randperm(k).int() if order else None,
        torch.ones(k) if norm else None,
        fusion,
        1e-6,
        rotated,
    )
    torch.library.opcheck(quantize_activation, arguments)


def test_refuses_in_one_sentence() -> None:
    with pytest.raises(QtoolError, match="did you mean rms-norm"):
        quantize_activation(torch.randn(2, 64), None, None, "rmsnorm", 0.0)
    with pytest.raises(QtoolError, match="multiple of 8"):
        quantize_activation(torch.randn(2, 60), None, None, "none", 0.0)
    with pytest.raises(QtoolError, match="K = 65544; expected a multiple of 8 up to 65536"):
        quantize_activation(torch.randn(2, 65544), None, None, "none", 0.0)
    with pytest.raises(QtoolError, match="multiple of 64"):
        quantize_activation(torch.randn(2, 96), None, None, "none", 0.0, True)
    with pytest.raises(QtoolError, match="norm is missing"):
        quantize_activation(torch.randn(2, 64), None, None, "rms-norm", 0.0)


def test_refuses_a_norm_of_which_16_bytes_cannot_be_read() -> None:
    """Unless an order gathers its weights one by one."""
    fake = FakeTensorMode()

    def there(x: Tensor) -> Tensor:
        return FakeTensor(fake, x.to("meta"), torch.device("cuda:0"))

    x, order = there(torch.ones(2, 64).half()), there(torch.arange(64).int())
    weights = torch.ones(72, dtype=torch.half, device="meta")
    QuantizeActivation(x, None, there(weights[8:]), "rms-norm", 0.0).require()
    QuantizeActivation(x, order, there(weights[1:65]), "rms-norm", 0.0).require()
    with pytest.raises(QtoolError, match="norm starts at storage offset 1; it must be 16-byte"):
        QuantizeActivation(x, None, there(weights[1:65]), "rms-norm", 0.0).require()
