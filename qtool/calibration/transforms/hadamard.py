"""Hadamard matrices of all orders that models need, and the randomized rotation made from them.

A Hadamard matrix is ``H [n, n]`` of +-1 with ``H H^T = n I``. Dense ones are constructed: Sylvester
(a power of two), Paley I (``q + 1``, q a prime power, q = 3 mod 4), Paley II (``2 (q + 1)``, q = 1
mod 4), Williamson (``4 m`` from four symmetric circulants with ``A A^T + B B^T + C C^T + D D^T = 4
m I``). Every other order is a Kronecker product of those. The rotation of QuaRot (Ashkboos et al.,
2024) is ``Q = H diag(s) / sqrt(n)`` with random signs ``s``; ``x Q`` costs ``n (d1 + d2 + ...)``
for factors d_i.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, lru_cache, partial

import torch
from torch import Tensor

from qtool.calibration.transforms.finite_fields import jacobsthal, prime_power
from qtool.errors import QtoolError, require_count

#: first rows of the Williamson circulants of order m, found by search: bit i is the sign of entries
#: i + 1 and m - i - 1 (1: plus), entry 0 is plus. These reach 92, 116, 156 and 172, which Paley
#: does not. The search for 39 was limited to rows that become each other if the indices are
#: multiplied by 16 (the last row becomes itself), the one for 43 to rows that a factor of 6 keeps.
WILLIAMSON = {
    23: (0x0BB, 0x563, 0x511, 0x736),
    29: (0x04F5, 0x2435, 0x27D2, 0x38ED),
    39: (0x543C8, 0x02CB9, 0x6A606, 0x43688),
    43: (0x01AA63, 0x1BAF06, 0x1392F5, 0x16686F),
}

#: cost of a factor besides its order: one pass over the data
PASS_COST = 16


@dataclass(frozen=True)
class Hadamard:
    """The orthogonal ``Q [n, n] = H diag(s) / sqrt(n)``, applied fast along the last dimension.

    Args:
        n: the order. If no Hadamard matrix of order n is known, Q is block diagonal with the
            largest known order that divides n (``block``).
        seed: seed of the signs ``s``; ``None`` means all plus.
        keeps_ones: multiply by the reflection that makes ``ones Q = ones``. LayerNorm commutes
            with such a rotation, which keeps the mean that it subtracts; RMSNorm commutes with any.
    """

    n: int
    seed: int | None = None
    keeps_ones: bool = False
    block: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "block", largest_order(self.n))

    def __call__(self, x: Tensor) -> Tensor:
        """``x Q`` for ``x [..., n]``, in x's dtype (float64 for folding into weights)."""
        y = self._signed(x)
        if self.keeps_ones:
            ones = torch.full((self.n,), self.n**-0.5, dtype=x.dtype, device=x.device)
            normal = self._signed(ones) - ones
            square = (normal @ normal).clamp(min=torch.finfo(x.dtype).tiny)  # 0 where n is 1
            y = y - (y @ normal)[..., None] * (2 / square) * normal
        return y

    def _signed(self, x: Tensor) -> Tensor:
        orders = factors(self.block)
        assert orders is not None
        y = multiply(x.unflatten(-1, (-1, self.block)), orders).flatten(-2) * self.block**-0.5
        return y if self.seed is None else y * random_signs(self.n, self.seed).to(y)


def rotation(n: int, *, seed: int | None = 0, keeps_ones: bool = False) -> Hadamard:
    """The orthogonal ``Q [n, n]`` that spreads outliers: call it on ``x [..., n]`` for ``x Q``.

    Args:
        seed: seed of the random signs; None means all plus.
        keeps_ones: ``ones Q = ones``, as LayerNorm needs.

    Raises:
        QtoolError: ``n`` is odd and above 1, or not a size.

    >>> q = rotation(96)
    >>> x, w = torch.randn(4, 96), torch.randn(8, 96)
    >>> torch.allclose(q(x) @ q(w).T, x @ w.T, atol=1e-4)
    True
    >>> outlier = torch.zeros(96)
    >>> outlier[3] = 96.0
    >>> torch.allclose(q(outlier).abs(), torch.full((96,), 96**0.5))
    True
    """
    require_count("rotation: n", n)
    return Hadamard(n, seed, keeps_ones)


def multiply(x: Tensor, orders: tuple[int, ...]) -> Tensor:
    """``x (H1 kron H2 kron ...)`` for ``x [..., d1 d2 ...]``."""
    y = x.unflatten(-1, orders)
    for i, order in enumerate(orders):
        dim = i - len(orders)
        y = (y.movedim(dim, -1) @ dense(order).to(y)).movedim(-1, dim)
    return y.flatten(-len(orders))


def random_signs(n: int, seed: int) -> Tensor:
    """Random signs +-1 ``[n]``, the same on all devices."""
    return torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(seed)) * 2 - 1


def largest_order(n: int) -> int:
    """The largest divisor of ``n`` that is a known Hadamard order.

    Raises:
        QtoolError: ``n`` is odd and above 1; it has no such divisor but 1.
    """
    if n > 1 and n % 2:
        raise QtoolError(
            f"no Hadamard matrix of order {n}: an order is 1, 2 or a multiple of 4, and none "
            f"divides {n}"
        )
    return next(d for d in range(n, 0, -1) if n % d == 0 and factors(d) is not None)


@cache
def factors(n: int) -> tuple[int, ...] | None:
    """Orders of dense Hadamard matrices whose Kronecker product has order ``n``; None: unknown.

    Of all such products this one costs least to apply.
    """
    if n <= 2:
        return (n,)
    if n % 4:
        return None
    best: tuple[int, ...] | None = (n,) if construction(n) else None
    for d in range(2, n // 2 + 1):
        if n % d == 0 and construction(d):
            rest = factors(n // d)
            if rest is not None and (best is None or _cost(d, *rest) < _cost(*best)):
                best = (d, *rest)
    return best


def _cost(*orders: int) -> int:
    return sum(orders) + PASS_COST * len(orders)


def construction(n: int) -> Callable[[], Tensor] | None:
    """What makes a Hadamard matrix of order ``n`` in one piece; None: no construction here."""
    if n & (n - 1) == 0:
        return partial(sylvester, n)
    if n % 4:
        return None
    if prime_power(n - 1):
        return partial(paley_one, n - 1)
    if n // 4 in WILLIAMSON:
        return partial(williamson, n // 4)
    return partial(paley_two, n // 2 - 1) if n % 8 == 4 and prime_power(n // 2 - 1) else None


@lru_cache(maxsize=64)
def dense(n: int) -> Tensor:
    """The Hadamard matrix of order ``n`` by its :func:`construction`."""
    make = construction(n)
    assert make is not None
    return make()


def sylvester(n: int) -> Tensor:
    """Order ``n``, a power of two: Kronecker products of ``[[1, 1], [1, -1]]``."""
    matrix = torch.ones(1, 1, dtype=torch.int8)
    for _ in range(n.bit_length() - 1):
        matrix = torch.kron(matrix, torch.tensor([[1, 1], [1, -1]], dtype=torch.int8))
    return matrix


def paley_one(q: int) -> Tensor:
    """Order ``q + 1`` for a prime power q = 3 mod 4: ``I + S`` with ``S = [[0, 1], [-1, chi]]``."""
    matrix = torch.ones(q + 1, q + 1, dtype=torch.int8)
    matrix[1:, 0] = -1
    matrix[1:, 1:] = jacobsthal(q) + torch.eye(q, dtype=torch.int8)
    return matrix


def paley_two(q: int) -> Tensor:
    """Order ``2 (q + 1)`` for a prime power q = 1 mod 4.

    It is ``S x [[1, 1], [1, -1]] + I x [[1, -1], [-1, -1]]``.
    """
    conference = torch.ones(q + 1, q + 1, dtype=torch.int8)
    conference[0, 0] = 0
    conference[1:, 1:] = jacobsthal(q)
    plus = torch.tensor([[1, 1], [1, -1]], dtype=torch.int8)
    diagonal = torch.tensor([[1, -1], [-1, -1]], dtype=torch.int8)
    return torch.kron(conference, plus) + torch.kron(torch.eye(q + 1, dtype=torch.int8), diagonal)


def williamson(m: int) -> Tensor:
    """Order ``4 m`` from the four symmetric circulants of :data:`WILLIAMSON`."""
    a, b, c, d = (circulant(m, bits) for bits in WILLIAMSON[m])
    rows = ((a, b, c, d), (-b, a, -d, c), (-c, d, a, -b), (-d, -c, b, a))
    return torch.cat([torch.cat(row, 1) for row in rows])


def circulant(m: int, bits: int) -> Tensor:
    """The symmetric circulant ``[m, m]`` of +-1 with its first row from ``bits``."""
    half = [1 if bits >> i & 1 else -1 for i in range((m - 1) // 2)]
    row = torch.tensor([1, *half, *reversed(half)], dtype=torch.int8)
    i = torch.arange(m)
    return row[(i[None, :] - i[:, None]) % m]
