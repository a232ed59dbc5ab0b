import pytest
import torch

from qtool.calibration.transforms.finite_fields import jacobsthal, prime_power
from qtool.calibration.transforms.hadamard import (
    Hadamard,
    construction,
    dense,
    factors,
    largest_order,
    multiply,
    rotation,
)
from qtool.errors import QtoolError

HIDDEN_SIZES = (
    384,
    768,
    896,
    1536,
    2560,
    3584,
    4864,
    5120,
    6656,
    7168,
    8960,
    11008,
    13824,
    14336,
    18944,
    29568,
)


@pytest.mark.parametrize("n", (1, 2, 80, 96, 120, 344))
def test_rows_of_products_are_orthogonal(n):
    require_hadamard(multiply(torch.eye(n, dtype=torch.float64), factors(n)))


def test_rows_of_every_construction_are_orthogonal():
    orders = [n for n in range(1, 401) if construction(n)]
    assert {12, 20, 28, 36, 52, 92, 116, 156, 172, 244, 256, 344} <= {*orders}
    for n in orders:
        require_hadamard(dense(n).double())


def require_hadamard(h):
    assert h.abs().eq(1).all()
    assert torch.equal(h @ h.T, len(h) * torch.eye(len(h), dtype=torch.float64))


@pytest.mark.parametrize("n", HIDDEN_SIZES)
def test_sizes_of_models_have_a_full_construction(n):
    assert torch.tensor(factors(n)).prod() == n
    for order in factors(n):
        require_hadamard(dense(order).double())
    assert largest_order(n) == n


def test_most_orders_up_to_400_are_known():
    unknown = [n for n in range(4, 401, 4) if largest_order(n) != n]
    assert unknown == [188, 236, 260, 268, 292, 324, 356, 372, 376]


def test_an_unknown_order_says_so():
    assert factors(668) is None
    with pytest.raises(QtoolError, match="order 15"):
        Hadamard(15)
    for size in (0, -4, 64.0, "64"):
        with pytest.raises(QtoolError, match=f"n {size!r}: a whole number of at least 1"):
            rotation(size)


@pytest.mark.parametrize("n", (8, 96, 156, 260, 384))
@pytest.mark.parametrize("keeps_ones", (False, True))
def test_rotation_is_orthogonal_and_fast_equals_dense(n, keeps_ones):
    rotation = Hadamard(n, seed=3, keeps_ones=keeps_ones)
    q = rotation(torch.eye(n, dtype=torch.float64))
    torch.testing.assert_close(q @ q.T, torch.eye(n, dtype=torch.float64))
    x = torch.randn(2, 5, n, dtype=torch.float64)
    torch.testing.assert_close(rotation(x), x @ q)


@pytest.mark.parametrize("n", (156, 172))
def test_a_williamson_order_is_one_block(n):
    rotation = Hadamard(n)
    assert rotation.block == n
    torch.testing.assert_close(rotation(torch.eye(n)).abs(), torch.full((n, n), n**-0.5))


def test_block_diagonal_where_no_full_order_is_known():
    rotation = Hadamard(260)
    assert rotation.block == 52
    q = rotation(torch.eye(260))
    assert q[:52, 52:].abs().max() == 0


def test_keeping_the_ones_commutes_with_layer_norm():
    rotation = Hadamard(96, seed=1, keeps_ones=True)
    x = torch.randn(7, 96, dtype=torch.float64) + 3
    torch.testing.assert_close(
        rotation(torch.ones(96, dtype=torch.float64)), torch.ones(96, dtype=torch.float64)
    )
    norm = torch.nn.functional.layer_norm
    torch.testing.assert_close(norm(rotation(x), (96,)), rotation(norm(x, (96,))))
    plain = Hadamard(96, seed=1)
    assert not torch.allclose(norm(plain(x), (96,)), plain(norm(x, (96,))))


@pytest.mark.parametrize("seed", (None, 0, 1))
def test_a_single_channel_keeps_its_one(seed):
    assert rotation(1, seed=seed, keeps_ones=True)(torch.ones(3, 1)).tolist() == [[1]] * 3


def test_seeds_differ_and_repeat():
    x = torch.randn(3, 64)
    assert torch.equal(Hadamard(64, 1)(x), Hadamard(64, 1)(x))
    assert not torch.equal(Hadamard(64, 1)(x), Hadamard(64, 2)(x))


@pytest.mark.parametrize("q", (7, 9, 13, 25, 27))
def test_half_of_the_nonzero_field_elements_are_squares(q):
    character = jacobsthal(q)
    assert character.diagonal().eq(0).all()
    assert character.sum(1).eq(0).all()
    assert torch.equal(character, character.T if q % 4 == 1 else -character.T)


def test_prime_powers():
    assert prime_power(343) == (7, 3) and prime_power(2) == (2, 1)
    assert prime_power(1) is None and prime_power(12) is None
