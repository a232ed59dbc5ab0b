"""Facts of one tensor of a forward: the channels that its elements depend on, and how.

The package docstring defines the terms and has an example.

Legend: C channels.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

#: the producer of the residual stream, and of the scores of attention
STREAM, SCORES = "residual stream", "scores of attention"
#: the operation that queries and keys go into
ATTENTION = "attention"
#: stands before the number of the first row in the name of a part of a fused linear
PART = "#"


class Kind(IntEnum):
    """How an element depends on its channel of the producer; a later one promises less.

    A positive factor on each channel passes through ``LINEAR``, ``HEADS`` and ``SCALED``. A
    permutation of the channels passes through these (``HEADS``: within a head) and ``ORDERED``,
    unless the producer is in :attr:`.trace.Trace.unordered`.
    """

    LINEAR = 0  # linear in it, with one coefficient for all channels
    SUM = 1  # linear in it as above, and something else is added
    HEADS = 2  # linear, with one coefficient for the channels of a head
    SCALED = 3  # linear, with a coefficient of its own for each channel
    ORDERED = 4  # some function of it alone
    TURNED = 5  # turned by RoPE together with its partner
    MIXED = 6  # of several channels


class Fact(NamedTuple):
    """How a tensor depends on one producer.

    Attributes:
        channels: the producer's channel of each element (-1: none), an int tensor.
        factor: number that all elements were multiplied by; for the residual stream, since it was
            last normed or written to. An unknown number counts as 1, and so does a gate for each
            token.
    """

    channels: Tensor | None
    kind: Kind
    factor: float = 1.0


Facts = dict[str, Fact]


def is_stream(facts: Facts) -> bool:
    """Whether these are the facts of the residual stream itself."""
    return facts.keys() == {STREAM} and facts[STREAM].kind == Kind.LINEAR


def rows_of(fact: Fact) -> Tensor:
    """The rows of its producer that a fact takes, in order."""
    assert fact.channels is not None
    rows = fact.channels.flatten().long().unique()
    return rows[rows >= 0]


def contiguous(rows: Tensor) -> bool:
    """Whether rows follow one another."""
    return bool((rows == torch.arange(len(rows)) + rows[0]).all())


def in_order(fact: Fact) -> bool:
    """Whether element c depends on channel c, for every token."""
    channels = fact.channels
    return channels is not None and bool((channels == torch.arange(channels.shape[-1])).all())


def in_order_of_rows(fact: Fact) -> bool:
    """Whether the elements depend on the fact's rows in their order, for every token."""
    channels, rows = fact.channels, rows_of(fact)
    return (
        channels is not None
        and channels.shape[-1] == len(rows)
        and bool((channels == rows.to(channels.dtype)).all())
    )


def channelwise(facts: Facts) -> Facts:
    """Those of ``facts`` whose channels are known."""
    return {p: f for p, f in facts.items() if f.channels is not None}
