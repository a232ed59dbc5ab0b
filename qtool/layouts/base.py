"""What a packed layout is: a permutation of 4-bit (or 8-bit) codes, stated once, as digits.

A weight index ``n`` (output channel) and ``k`` (input channel) are written in mixed radix, most
significant digit first: ``"nt w:4 h:2 q:8"`` means ``n = ((nt * 4 + w) * 2 + h) * 8 + q``; the
leading digit has no size, it counts the tiles. A layout says in which order the same digits make
up the byte address, and which digit picks the nibble (0 = low, 1 = high). From that one statement
follow ``address``, ``pack``, ``unpack``, the shape on disk, and the order of the parameters.

Commas in an order split it into the dimensions of the stored tensor.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from qtool.errors import QtoolError

#: a run of bytes that stays together is moved as one integer of this many bytes
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Layout(ABC):
    """Where the codes and parameters of one weight ``[N, K]`` lie."""

    name: str
    bits: int
    #: the stored tensors ``pack`` makes
    tensors: ClassVar[tuple[str, ...]] = ("qweight",)

    @abstractmethod
    def require(self, n: int, k: int) -> None:
        """Raise QtoolError unless a weight ``[n, k]`` fits the layout's tile."""

    @abstractmethod
    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        """Stored tensors of ``codes [N, K]`` (uint8 0..15, or int8 kept as two's complement nibbles)."""

    @abstractmethod
    def unpack(self, packed: dict[str, Tensor], n: int, k: int, *, signed: bool) -> Tensor:
        """The codes ``[n, k]`` again: int8 if ``signed``, else uint8. Inverse of :meth:`pack`."""

    def pack_group(self, param: Tensor) -> Tensor:
        """A per-group parameter ``[N, G]`` in the kernel's order; here as it is."""
        return param

    def unpack_group(self, stored: Tensor, n: int) -> Tensor:
        """Inverse of :meth:`pack_group`: ``[n, G]``."""
        return stored

    def pack_channel(self, param: Tensor) -> Tensor:
        """A per-channel parameter ``[N]`` in the kernel's order; here as it is."""
        return param

    def unpack_channel(self, stored: Tensor) -> Tensor:
        """Inverse of :meth:`pack_channel`: ``[N]``."""
        return stored


Digits = tuple[tuple[str, int], ...]


def parse_digits(text: str) -> Digits:
    """``"nt w:4 q:8"`` -> ``(("nt", 0), ("w", 4), ("q", 8))``; 0 marks the unbounded leading digit."""
    pairs = (part.partition(":") for part in text.split())
    return tuple((name, int(size or 0)) for name, _, size in pairs)


def _sizes(digits: Digits, extent: int) -> dict[str, int]:
    tile = prod(size for _, size in digits if size)
    return {name: size or extent // tile for name, size in digits}


@dataclass(frozen=True)
class Permutation:
    """Digits of one index, in another order: ``source`` reordered to ``order`` (commas = dimensions)."""

    source: str
    order: str
    digits: Digits = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digits", parse_digits(self.source))

    @property
    def names(self) -> list[str]:
        return self.order.replace(",", " ").split()

    def apply(self, tensor: Tensor, sizes: dict[str, int]) -> Tensor:
        """``tensor`` whose dimensions are the source digits (flattened) -> stored dimensions."""
        source = [name for name, _ in self.digits]
        view = tensor.reshape([sizes[name] for name in source])
        moved = view.permute([source.index(name) for name in self.names])
        return moved.reshape([prod(sizes[d] for d in dim.split()) for dim in self.order.split(",")])

    def invert(self, stored: Tensor, sizes: dict[str, int]) -> Tensor:
        """Inverse of :meth:`apply`, flat."""
        names = self.names
        view = stored.reshape([sizes[name] for name in names])
        return view.permute([names.index(name) for name, _ in self.digits]).reshape(-1)


@dataclass(frozen=True)
class DigitLayout(Layout):
    """A layout stated by digits.

    Args:
        n: digits of the output channel. k: digits of the input channel.
        order: the byte address; every digit once but the nibble digit.
        nibble: the digit (size 2) that chooses low or high nibble; ``None`` for 8-bit codes.
        dtype: stored dtype; the byte tensor's last dimension is viewed as it.
        group_order: order of a per-group parameter over the n digits and ``g``; ``None`` keeps ``[N, G]``.
        channel_order: order of a per-channel parameter over the n digits; ``None`` keeps ``[N]``.
    """

    name: str
    n: str
    k: str
    order: str
    nibble: str | None = None
    dtype: torch.dtype = torch.uint8
    group_order: str | None = None
    channel_order: str | None = None

    @property
    def bits(self) -> int:  # type: ignore[override]
        return 4 if self.nibble else 8

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns a weight must be a multiple of."""
        rows, columns = (prod(s for _, s in parse_digits(t) if s) for t in (self.n, self.k))
        return rows, columns

    def require(self, n: int, k: int) -> None:
        rows, columns = self.tile
        if n % rows or k % columns or not n or not k:
            raise QtoolError(
                f"layout {self.name}: a weight of {n} x {k} does not divide into tiles of {rows} x {columns}"
            )

    def sizes(self, n: int, k: int) -> dict[str, int]:
        """The size of every digit for a weight ``[n, k]``."""
        return _sizes(parse_digits(self.n), n) | _sizes(parse_digits(self.k), k)

    def address(self, n: Tensor, k: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Byte and nibble of element ``(n, k)`` of a weight of ``shape``; n and k broadcast."""
        sizes, digit = self.sizes(*shape), {}
        for text, index in ((self.n, n), (self.k, k)):
            for name, _ in reversed(parse_digits(text)):
                digit[name] = index % sizes[name]
                index = index // sizes[name]
        byte = torch.zeros_like(n + k)
        for name in self.order.replace(",", " ").split():
            byte = byte * sizes[name] + digit[name]
        return byte, digit[self.nibble] if self.nibble else torch.zeros_like(byte)

    def pack(self, codes: Tensor) -> dict[str, Tensor]:
        self.require(*codes.shape)
        move, sizes, word = self._moves(*codes.shape)
        elements = codes.contiguous().view(torch.uint8).view(word)
        if self.nibble:
            low, high = self._halves(elements, sizes)
            elements = (low & _mask(word)) | ((high & _mask(word)) << 4)
        stored = move.apply(elements, sizes).view(torch.uint8)
        return {"qweight": stored.contiguous().view(self.dtype)}

    def unpack(self, packed: dict[str, Tensor], n: int, k: int, *, signed: bool) -> Tensor:
        self.require(n, k)
        move, sizes, word = self._moves(n, k)
        stored = packed["qweight"].contiguous().view(torch.uint8)
        elements = move.invert(stored.view(word), sizes)
        if not self.nibble:
            codes = elements.view(torch.uint8).reshape(n, k)
            return codes.view(torch.int8) if signed else codes
        codes = torch.empty(n, k, dtype=torch.uint8, device=stored.device)
        low, high = self._halves(codes.view(word), sizes)
        low.copy_((elements & _mask(word)).view(low.shape))
        high.copy_(((elements >> 4) & _mask(word)).view(high.shape))
        return sign_extend(codes) if signed else codes

    def pack_group(self, param: Tensor) -> Tensor:
        if self.group_order is None:
            return param
        sizes = _sizes(parse_digits(self.n), param.shape[0]) | {"g": param.shape[1]}
        return Permutation(f"{self.n} g", self.group_order).apply(param, sizes).contiguous()

    def unpack_group(self, stored: Tensor, n: int) -> Tensor:
        if self.group_order is None:
            return stored
        sizes = _sizes(parse_digits(self.n), n) | {"g": stored.numel() // n}
        return Permutation(f"{self.n} g", self.group_order).invert(stored, sizes).reshape(n, -1)

    def pack_channel(self, param: Tensor) -> Tensor:
        if self.channel_order is None:
            return param
        sizes = _sizes(parse_digits(self.n), param.shape[0])
        return Permutation(self.n, self.channel_order).apply(param, sizes).flatten()

    def unpack_channel(self, stored: Tensor) -> Tensor:
        if self.channel_order is None:
            return stored
        sizes = _sizes(parse_digits(self.n), stored.numel())
        return Permutation(self.n, self.channel_order).invert(stored, sizes)

    def _moves(self, n: int, k: int) -> tuple[Permutation, dict[str, int], torch.dtype]:
        """The byte permutation, digit sizes, and the integer that carries a run of bytes.

        If the fastest digit of k is also the fastest of the address, its bytes move together.
        """
        sizes, word = self.sizes(n, k), torch.uint8
        source = [name for name, _ in parse_digits(f"{self.n} {self.k}") if name != self.nibble]
        last = source[-1]
        if self.order.split()[-1] == last and parse_digits(self.k)[-1][0] == last and sizes[last] in WORDS:
            word = WORDS[sizes[last]]
            sizes = sizes | {last: 1}
        return Permutation(" ".join(source), self.order), sizes, word

    def _halves(self, elements: Tensor, sizes: dict[str, int]) -> tuple[Tensor, Tensor]:
        """Views of the elements that go to the low and to the high nibble."""
        names = [name for name, _ in parse_digits(f"{self.n} {self.k}")]
        view = elements.view([sizes[name] for name in names])
        low, high = view.unbind(names.index(str(self.nibble)))
        return low, high


def sign_extend(nibbles: Tensor) -> Tensor:
    """Two's complement nibbles (uint8 0..15) as int8 -8..7."""
    return ((nibbles << 4).view(torch.int8)) >> 4


def _mask(word: torch.dtype) -> int:
    """``0x0F`` in every byte of ``word``."""
    return int.from_bytes(bytes([0x0F] * word.itemsize), "little")
