"""A fixed order for the float sums of groups, which kernels may otherwise split.

Integer sums are exact in any order. Sums of scaled groups are floats, and equal the reference's
(:func:`qtool.schemes.arithmetic.products.group_matmul`) to the bit only if one block adds all of
them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_ONE_ORDER: ContextVar[bool] = ContextVar("_ONE_ORDER", default=False)


@contextmanager
def groups_in_order() -> Iterator[None]:
    """Let kernels add groups in the reference's order while open.

    Then no tile is split over K, which costs time with few tokens.
    """
    before = _ONE_ORDER.set(True)
    try:
        yield
    finally:
        _ONE_ORDER.reset(before)


def adds_in_order() -> bool:
    """Whether :func:`groups_in_order` is open."""
    return _ONE_ORDER.get()
