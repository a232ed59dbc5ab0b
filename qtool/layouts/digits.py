"""Digits of an index, and their reordering: the language in which a layout is stated once.

A weight index ``n`` (output channel) and ``k`` (input channel) are written in mixed radix, most
significant digit first: ``"nt w:4 h:2 q:8"`` means ``n = ((nt * 4 + w) * 2 + h) * 8 + q``; the
leading digit has no size, it counts the tiles. A layout says in which order the same digits make
up the byte address, and which digit picks the nibble. From that one statement follow ``address``,
``pack``, ``unpack``, the shape on disk, and the order of the parameters.

Commas in an order split it into the dimensions of the stored tensor.
"""

from dataclasses import dataclass
from functools import cache
from math import prod

from torch import Tensor

Digits = tuple[tuple[str, int], ...]


@cache  # texts are a few constants, read again for each linear
def parse_digits(text: str) -> Digits:
    """``"nt w:4 q:8"`` -> ``(("nt", 0), ("w", 4), ("q", 8))``; 0: the unbounded leading digit."""
    pairs = (part.partition(":") for part in text.split())
    return tuple((name, int(size or 0)) for name, _, size in pairs)


def order_names(order: str) -> list[str]:
    """The digits of an order, most significant first, whatever dimensions they are in."""
    return order.replace(",", " ").split()


def tile_size(text: str) -> int:
    """The number that an index in these digits must be a multiple of."""
    return prod(size for _, size in parse_digits(text) if size)


def digit_sizes(text: str, extent: int) -> dict[str, int]:
    """The sizes of all digits of an index that runs to ``extent``."""
    return {name: size or extent // tile_size(text) for name, size in parse_digits(text)}


@dataclass(frozen=True)
class Permutation:
    """Digits in another order: ``source`` (most significant first) reordered to ``order``."""

    source: str
    order: str

    def apply(self, tensor: Tensor, sizes: dict[str, int]) -> Tensor:
        """``tensor``, whose flat index is the source digits, in the stored dimensions."""
        source = [name for name, _ in parse_digits(self.source)]
        view = tensor.reshape([sizes[name] for name in source])
        moved = view.permute([source.index(name) for name in order_names(self.order)])
        return moved.reshape([prod(sizes[d] for d in dim.split()) for dim in self.order.split(",")])

    def invert(self, stored: Tensor, sizes: dict[str, int]) -> Tensor:
        """Inverse of :meth:`apply`, flat."""
        names = order_names(self.order)
        view = stored.reshape([sizes[name] for name in names])
        places = [names.index(name) for name, _ in parse_digits(self.source)]
        return view.permute(places).reshape(-1)
