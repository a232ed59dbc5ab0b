"""The trace of a forward: its linear maps, norms, attentions and residual additions."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from qtool.models.derived.facts import Facts


@dataclass
class Read:
    """A linear map by a 2-D parameter that was called.

    Attributes:
        weight: the parameter's name.
        module: the module that was running.
        value_id: a number that inputs share if they are the same values in the same order.
        facts: facts of the input.
        transposed: the input is multiplied by the parameter's transpose, as a linear does.
    """

    weight: str
    module: str
    value_id: int
    facts: Facts
    transposed: bool = True


@dataclass
class NormCall:
    """A norm that was called, the facts of its input, and the value id of its output."""

    name: str
    facts: Facts
    value_id: int


@dataclass
class AttentionCall:
    """Facts of the queries, keys and values of one attention."""

    q: Facts
    k: Facts
    v: Facts


class Escape(NamedTuple):
    """An operation through which no rule follows a producer's values.

    Attributes:
        operation: its name, or what else happened to the values.
        module: the module that was running.
        channels: mask of the producer's channels that it took.
    """

    operation: str
    module: str
    channels: Tensor


@dataclass
class Trace:
    """All recorded calls, in order.

    Attributes:
        writers: each addition to the residual stream, with the facts of what was added.
        escapes: by producer, the operations on its output through which no rule follows it.
        unordered: producers whose channels were each combined with a number of its own that no
            producer makes.
        pairs: the two channels that RoPE turns together, by producer: ``[C, 2]`` rows.
        changed: weights that the forward changes.
        asked: weights of linears that are read outside the linear's own forward.
        experts: facts of stacked experts' inputs, by module.
        called: modules in the order in which they were called.
        changing: blocks that give on the residual stream changed channel by channel.
    """

    reads: list[Read] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    attentions: list[AttentionCall] = field(default_factory=list)
    writers: list[tuple[str, Facts]] = field(default_factory=list)
    escapes: dict[str, list[Escape]] = field(default_factory=dict)
    unordered: set[str] = field(default_factory=set)
    pairs: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[str, Read] = field(default_factory=dict)
    changed: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    called: list[str] = field(default_factory=list)
    changing: set[str] = field(default_factory=set)
