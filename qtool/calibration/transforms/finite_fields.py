"""The operations of finite fields that Paley's Hadamard matrices need.

An element of GF(p^k) is the list of its k coefficients, constant term last.
"""

import math
from functools import cache
from itertools import product

import torch
from torch import Tensor


def jacobsthal(q: int) -> Tensor:
    """The Jacobsthal matrix ``chi(a_i - a_j) [q, q]`` of the field of q elements.

    ``chi`` is the quadratic character: 1 for a square, -1 for a non-square, 0 for zero.
    """
    found = prime_power(q)
    assert found is not None
    p, k = found
    elements = torch.cartesian_prod(*[torch.arange(p)] * k).reshape(q, k)
    place = p ** torch.arange(k - 1, -1, -1)
    character = torch.full((q,), -1, dtype=torch.int8)
    squares = {tuple(_multiply(a, a, p, _irreducible(p, k))) for a in elements.tolist()}
    character[torch.tensor(sorted(squares)) @ place] = 1
    character[0] = 0
    difference = (elements[:, None] - elements[None, :]) % p
    return character[difference @ place]


@cache
def _irreducible(p: int, k: int) -> tuple[int, ...]:
    """Low coefficients of a monic irreducible polynomial of degree k over GF(p), constant last.

    The ring of this polynomial is a field exactly if no two nonzero elements multiply to zero.
    """
    if k == 1:
        return (0,)
    nonzero = [list(a) for a in product(range(p), repeat=k) if any(a)]
    monic = [a for a in nonzero if next(c for c in a if c) == 1 and any(a[:-1])]
    for low in product(range(p), repeat=k):
        if low[-1] and all(any(_multiply(a, b, p, low)) for a in monic for b in nonzero):
            return low
    raise AssertionError(f"no irreducible polynomial of degree {k} over GF({p})")


def _multiply(a: list[int], b: list[int], p: int, low: tuple[int, ...]) -> list[int]:
    """``a b`` modulo ``x^k + low`` and p; coefficients have the constant term last."""
    result = [0] * len(a)
    for coefficient in a:  # Horner: result <- result x + coefficient b
        top, result = result[0], [*result[1:], 0]
        result = [
            (r + coefficient * c - top * f) % p for r, c, f in zip(result, b, low, strict=True)
        ]
    return result


@cache
def prime_power(q: int) -> tuple[int, int] | None:
    """``(p, k)`` with ``q = p^k``, or None."""
    p = next((d for d in range(2, math.isqrt(q) + 1) if q % d == 0), q)  # the least prime factor
    k = round(math.log(q, p)) if p > 1 else 0
    return (p, k) if k and p**k == q else None
