"""A 4-bit or 8-bit layout stated as a permutation of index digits (:mod:`qtool.layouts.digits`).

Nearly every layout is one object of this class.
"""

import re
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from qtool.errors import QtoolError
from qtool.layouts.base import Layout, require_bytes, require_codes
from qtool.layouts.digits import Permutation, digit_sizes, order_names, parse_digits, tile_size
from qtool.layouts.words import (
    WORDS,
    as_words,
    merge_bytes,
    merge_nibbles,
    sign_extend_,
    split_bytes,
    split_nibbles,
)

#: the digits of an index: the first counts tiles and has no size
DIGITS = re.compile(r"[A-Za-z]\w*(\s+[A-Za-z]\w*:[1-9][0-9]*)*")


@dataclass(frozen=True)
class DigitLayout(Layout):
    """A layout stated by digits.

    Args:
        n: digits of the output channel.
        k: digits of the input channel.
        order: digits of the byte address; it has each digit once, except the nibble digit.
        nibble: the digit (size 2) that chooses the nibble of the byte; ``None`` for 8-bit codes.
        low: the value of the nibble digit that lies in the low nibble.
        dtype: stored dtype; the last dimension of the byte tensor is viewed in it.
        rows: give the stored tensor N rows, whatever the order, for readers that declare it
            ``[N, K / 2]``.
        group_order: order of a per-group parameter over the n digits and ``g``; ``None`` keeps
            ``[N, G]``.
        channel_order: order of a per-channel parameter over the n digits; ``None`` keeps ``[N]``.

    Raises:
        QtoolError: if an order is no permutation of its digits, the nibble is no digit of size 2,
            ``n`` or ``k`` is no list of digits, or the dtype is a floating-point one.
    """

    name: str
    n: str
    k: str
    order: str
    nibble: str | None = None
    low: int = 0
    dtype: torch.dtype = torch.uint8
    rows: bool = False
    group_order: str | None = None
    channel_order: str | None = None

    def __post_init__(self) -> None:
        for what, text in {"n": self.n, "k": self.k}.items():
            if not DIGITS.fullmatch(text):
                raise QtoolError(
                    f"layout {self.name}: {what} is {text!r}; names of digits are expected, all but"
                    " the first with a size, as 'nt a:2 b:8'"
                )
        rows, digits = parse_digits(self.n), parse_digits(f"{self.n} {self.k}")
        if len({name for name, _ in digits}) < len(digits):
            raise QtoolError(f"layout {self.name}: a digit is twice in {self.n!r} and {self.k!r}")
        if self.low not in (0, 1) or self.dtype.is_floating_point:
            raise QtoolError(
                f"layout {self.name}: low is {self.low} and dtype {self.dtype}; 0 or 1 and a dtype"
                " of whole numbers are expected"
            )
        if self.nibble is not None and (self.nibble, 2) not in digits:
            raise QtoolError(f"layout {self.name}: nibble {self.nibble!r} is no digit of size 2")
        n = [name for name, _ in rows]
        last = order_names(self.order.split(",")[-1])
        stored = prod(size for name, size in digits if size and name in last)
        if not self.rows and stored % self.dtype.itemsize:
            raise QtoolError(
                f"layout {self.name}: the last dimension of order {self.order!r} goes by {stored} "
                f"bytes, which {self.dtype} does not divide"
            )
        for what, expected in {
            "order": [name for name, _ in digits if name != self.nibble],
            "group_order": [*n, "g"],
            "channel_order": n,
        }.items():
            order = getattr(self, what)
            if order is not None and sorted(order_names(order)) != sorted(expected):
                raise QtoolError(
                    f"layout {self.name}: {what} {order!r}: each of {', '.join(expected)} is"
                    " expected once"
                )

    @property
    def bits(self) -> int:  # type: ignore[override]
        return 4 if self.nibble else 8

    @property
    def by_rows(self) -> bool:  # type: ignore[override]
        first = self.n.split()[0]
        orders = (self.order, self.group_order, self.channel_order)
        return all(order is None or order_names(order)[0] == first for order in orders)

    @property
    def tile(self) -> tuple[int, int]:  # type: ignore[override]
        return tile_size(self.n), tile_size(self.k)

    def sizes(self, n: int, k: int) -> dict[str, int]:
        """The sizes of all digits for a weight ``[n, k]``."""
        return digit_sizes(self.n, n) | digit_sizes(self.k, k)

    def address(self, n: Tensor, k: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Byte and nibble (0 low, 1 high) of element ``(n, k)`` of a weight of ``shape``.

        n and k broadcast.
        """
        sizes, digit = self.sizes(*shape), {}
        for text, index in ((self.n, n), (self.k, k)):
            for name, _ in reversed(parse_digits(text)):
                digit[name] = index % sizes[name]
                index = index // sizes[name]
        byte = torch.zeros_like(n + k)
        for name in order_names(self.order):
            byte = byte * sizes[name] + digit[name]
        return byte, digit[self.nibble] ^ self.low if self.nibble else torch.zeros_like(byte)

    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        require_codes(self.name, codes)
        self.require(*codes.shape)
        plan = self._plan(*codes.shape)
        elements = as_words(codes, plan.word)
        if self.nibble:
            elements = merge_nibbles(*self._halves(elements, plan))
        if plan.pair:
            elements = merge_bytes(*plan.split(elements))
        stored = plan.move.apply(elements, plan.sizes).contiguous().view(torch.uint8)
        shape = (codes.shape[0], -1) if self.rows else stored.shape
        return {"qweight": stored.view(shape).view(self.dtype)}

    def unpack(self, packed: dict[str, Tensor], n: int, k: int, *, signed: bool) -> Tensor:
        self.require(n, k)
        require_bytes(self.name, packed["qweight"], n * k * self.bits // 8)
        plan = self._plan(n, k)
        elements = plan.move.invert(as_words(packed["qweight"], plan.moved), plan.sizes)
        if plan.pair:
            merged = torch.empty(
                elements.nbytes // plan.word.itemsize, dtype=plan.word, device=elements.device
            )
            split_bytes(elements, *plan.split(merged))
            elements = merged
        if not self.nibble:
            codes = elements.view(torch.uint8).reshape(n, k)
            return codes.view(torch.int8) if signed else codes
        codes = torch.empty(n, k, dtype=torch.uint8, device=elements.device)
        split_nibbles(elements, *self._halves(codes.view(plan.word), plan))
        return sign_extend_(codes) if signed else codes

    def pack_group(self, param: Tensor) -> Tensor:
        if self.group_order is None:
            return param
        sizes = digit_sizes(self.n, param.shape[0]) | {"g": param.shape[1]}
        return Permutation(f"{self.n} g", self.group_order).apply(param, sizes).contiguous()

    def unpack_group(self, stored: Tensor, n: int) -> Tensor:
        if self.group_order is None:
            return stored
        sizes = digit_sizes(self.n, n) | {"g": stored.numel() // n}
        return Permutation(f"{self.n} g", self.group_order).invert(stored, sizes).reshape(n, -1)

    def pack_channel(self, param: Tensor) -> Tensor:
        if self.channel_order is None:
            return param
        sizes = digit_sizes(self.n, param.shape[0])
        return Permutation(self.n, self.channel_order).apply(param, sizes).flatten()

    def unpack_channel(self, stored: Tensor) -> Tensor:
        if self.channel_order is None:
            return stored
        sizes = digit_sizes(self.n, stored.numel())
        return Permutation(self.n, self.channel_order).invert(stored, sizes)

    def _plan(self, n: int, k: int) -> "_Plan":
        """The byte moves of ``pack``, as single bytes or as runs of bytes that stay together."""
        sizes, word, pair, order = self.sizes(n, k), torch.uint8, None, self.order
        source = [name for name, _ in parse_digits(f"{self.n} {self.k}") if name != self.nibble]
        last, tail = source[-1], order.split(",")[-1].split()
        if parse_digits(self.k)[-1][0] == last and sizes[last] in WORDS:
            if tail[-1] == last:
                word = WORDS[sizes[last]]
            elif tail[-2:-1] == [last] and sizes[last] == sizes[tail[-1]] == 2:
                word, pair = torch.int16, tail[-1]
                order = order.rstrip().removesuffix(pair)
        move = Permutation(" ".join(name for name in source if name != pair), order)
        return _Plan(move, sizes if word == torch.uint8 else sizes | {last: 1}, word, pair, source)

    def _halves(self, elements: Tensor, plan: "_Plan") -> tuple[Tensor, Tensor]:
        """Views of the elements that go to the low and to the high nibble."""
        names = [name for name, _ in parse_digits(f"{self.n} {self.k}")]
        view = elements.view([plan.sizes[name] for name in names])
        halves = view.unbind(names.index(str(self.nibble)))
        return halves[self.low], halves[1 - self.low]


@dataclass(frozen=True)
class _Plan:
    """The byte permutation, in as few and as wide moves as possible.

    If the last digit of k is also the last of the address, its bytes move as one ``word``. If the
    address has one more digit after it, ``pair``, of size 2, the words of that digit's two values
    are merged byte by byte into a word of twice the size.
    """

    move: Permutation
    sizes: dict[str, int]
    word: torch.dtype
    pair: str | None
    source: list[str]

    @property
    def moved(self) -> torch.dtype:
        """The integer that ``move`` carries."""
        return torch.int32 if self.pair else self.word

    def split(self, elements: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the words whose ``pair`` digit is 0 and 1."""
        first, second = elements.view([self.sizes[d] for d in self.source]).unbind(
            self.source.index(str(self.pair))
        )
        return first, second
