"""Dynamic activation quantization: range, scale, zeros, subnormals."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qtool.errors import QtoolError
from qtool.schemes.arithmetic.activation import UNQUANTIZED, Activation, fake_groups


@settings(max_examples=60)
@given(
    st.sampled_from([4, 8]),
    st.sampled_from([None, 32, 128]),
    st.integers(-148, 120),
    st.integers(0, 999),
)
@example(8, None, -145, 0)  # subnormal, where a scale has few bits
@example(4, 32, -148, 0)
def test_codes_stay_in_range_and_within_half_a_step(
    bits: int, size: int | None, exponent: int, seed: int
) -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    kind = Activation(bits, size)
    codes, scale = kind.quantize(x)
    top = 2 ** (bits - 1) - 1
    assert int(codes.min()) >= -top and int(codes.max()) <= top
    error = (kind.dequantize(codes, scale) - x).abs().view(3, scale.shape[1], -1)
    assert (error <= 0.501 * scale[..., None]).all()


def test_formula() -> None:
    x = torch.tensor([[1.0, -2.0, 3.5, 7.0, 0.0, 0.0, 0.0, 0.0]])
    codes, scale = Activation(4, 4).quantize(x)
    assert codes.tolist() == [[1, -2, 4, 7, 0, 0, 0, 0]]
    assert scale.tolist() == [[1.0, 1.0]]


def test_fake_keeps_dtype_and_16_bits_pass() -> None:
    x = torch.randn(2, 3, 64, dtype=torch.bfloat16)
    assert Activation(8).fake(x).dtype == torch.bfloat16
    assert UNQUANTIZED.fake(x) is x


def test_refuses_what_does_not_divide() -> None:
    with pytest.raises(QtoolError, match="100 input channels are not divisible by group size 32"):
        Activation(4, 32).quantize(torch.randn(2, 100))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("bits", "group"), [(8, None), (4, 128), (4, 32)])
@pytest.mark.parametrize("k", [128, 4096, 28672])
def test_fused_fake_quantization_is_the_same_to_the_bit(
    dtype: torch.dtype, bits: int, group: int | None, k: int
) -> None:
    activation = Activation(bits, group)
    x = torch.randn(3, 5, k, device="cuda").to(dtype)
    x[0, 0] = 0
    x[0, 1, 7] = 300
    # on CUDA torch divides by a number through its reciprocal: the CPU says what is right
    assert torch.equal(activation.fake(x).cpu(), activation.fake(x.cpu()))
    size = group or k
    tops = torch.tensor([7, 127, 7, 1])[torch.arange(k // size) % 4]
    assert torch.equal(fake_groups(x, size, tops.cuda()).cpu(), fake_groups(x.cpu(), size, tops))


@pytest.mark.parametrize("bits", [0, 1, 9, 12, 32])
def test_bits_that_int8_codes_do_not_hold_are_refused(bits: int) -> None:
    with pytest.raises(QtoolError, match=f"bits is {bits}; 16, or 2 to 8, is expected"):
        Activation(bits)
