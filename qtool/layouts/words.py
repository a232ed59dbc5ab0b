"""Moves and merges runs of codes as whole machine words, for fast packing."""

import torch
from torch import Tensor

#: the integer that carries a run of so many bytes
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_words(tensor: Tensor, word: torch.dtype) -> Tensor:
    """The bytes of ``tensor``, in order, as integers ``word``.

    Only a strided or misaligned tensor is copied.
    """
    plain = tensor.contiguous()
    if plain.storage_offset() * plain.itemsize % word.itemsize:
        plain = plain.clone()
    return plain.view(torch.uint8).view(word)


def merge_nibbles(low: Tensor, high: Tensor) -> Tensor:
    """Merge codes ``low`` and ``high`` into bytes; bits above a code's four are dropped."""
    mask = _low_nibbles(low.dtype)
    return ((high & mask) << 4).bitwise_or_(low & mask)


def split_nibbles(merged: Tensor, low: Tensor, high: Tensor) -> None:
    """Inverse of :func:`merge_nibbles`, into ``low`` and ``high``."""
    mask = _low_nibbles(merged.dtype)
    low.copy_((merged & mask).view(low.shape))
    high.copy_((merged >> 4).bitwise_and_(mask).view(high.shape))


def merge_bytes(first: Tensor, second: Tensor) -> Tensor:
    """int16 words (a0, a1) and (b0, b1) zipped into int32 (a0, b0, a1, b1), lowest byte first."""
    return torch.stack(_transpose(first, second), -1).view(torch.int32).squeeze(-1)


def split_bytes(merged: Tensor, first: Tensor, second: Tensor) -> None:
    """Inverse of :func:`merge_bytes`, into ``first`` and ``second``."""
    low, high = merged.view(torch.int16).view(*first.shape, 2).unbind(-1)
    for out, value in zip((first, second), _transpose(low, high), strict=True):
        out.copy_(value)


def sign_extend_(nibbles: Tensor) -> Tensor:
    """Two's complement nibbles (uint8 0..15) as int8 -8..7, in place."""
    return nibbles.bitwise_left_shift_(4).view(torch.int8).bitwise_right_shift_(4)


def _transpose(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The 2 x 2 bytes of two int16: ((a0, a1), (b0, b1)) -> ((a0, b0), (a1, b1))."""
    low = (b << 8).bitwise_or_(a & 0xFF)
    high = (a >> 8).bitwise_and_(0xFF).bitwise_or_(b & ~0xFF)
    return low, high


def _low_nibbles(word: torch.dtype) -> int:
    """The mask of the low nibble of each byte of an integer ``word``."""
    return int.from_bytes(b"\x0f" * word.itemsize)
