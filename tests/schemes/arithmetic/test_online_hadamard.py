import torch

from qtool.calibration.transforms.hadamard import dense
from qtool.schemes.arithmetic.online_hadamard import SPAN, rotate, rotate_fast


def test_it_is_sylvesters_matrix_block_by_block() -> None:
    x = torch.randn(3, 2, 3 * SPAN)
    matrix = dense(SPAN).double() / SPAN**0.5
    expected = (x.double().unflatten(-1, (-1, SPAN)) @ matrix).flatten(-2)
    torch.testing.assert_close(rotate(x).double(), expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(rotate_fast(x), rotate(x), atol=1e-6, rtol=1e-6)
    assert rotate_fast(x.bfloat16()).dtype == torch.bfloat16
    assert rotate(x.bfloat16()).dtype == torch.float32


def test_it_is_its_own_inverse() -> None:
    codes = torch.randint(-9, 9, (4, SPAN)).float()  # whose sums are exact
    assert torch.equal(rotate(rotate(codes)), codes)


def test_a_large_value_is_spread() -> None:
    x = torch.zeros(1, 2 * SPAN)
    x[0, 5] = 64.0
    assert torch.equal(rotate(x)[0, :SPAN].abs(), torch.full((SPAN,), 8.0))
    assert not rotate(x)[0, SPAN:].any()
