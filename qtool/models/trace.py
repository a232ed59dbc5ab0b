"""Follows channels through one forward of a model on ``meta``: what reads what, and how.

Each tensor of the forward has *facts*: which linear, norm or embedding its values come from
(the producer), which output channel of it each element depends on, and how (:class:`Kind`).
Operations that move numbers (view, transpose, slice, cat, ...) are replayed on the channel numbers;
elementwise ones weaken the kind; all others end a fact, which is then an *escape* of its producer.
So a statement such as "down's input is ``act(gate) * up`` in up's order" is proved by what the
forward did, whatever the modules are called. What no rule covers proves nothing.

Legend: B sequences, S tokens, C channels.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

#: the producer of the residual stream, and of the scores of attention
STREAM, SCORES = "residual stream", "scores of attention"
#: what comes before the first row in the name of a part of a fused linear
PART = "#"


class Kind(IntEnum):
    """How a value depends on its producer's channel; a later one promises less."""

    LINEAR = 0  # linear in it, with one coefficient for all channels
    SUM = 1  # likewise, and something else is added
    HEADS = 2  # linear, with one coefficient for the channels of a head
    SCALED = 3  # linear, with a coefficient of its own: a positive factor passes
    ORDERED = 4  # some function of it alone: an order passes
    TURNED = 5  # turned by RoPE together with its partner
    MIXED = 6  # of several channels


class Fact(NamedTuple):
    """``channels``: the producer's channel of each element (-1: none), an int tensor."""

    channels: Tensor | None
    kind: Kind


Facts = dict[str, Fact]


@dataclass
class Read:
    """A linear map by a 2-D parameter that was called.

    Attributes:
        weight: the parameter's name. module: the module that was running.
        root: a number that inputs share if they are the same values in the same order.
        facts: of the input.
    """

    weight: str
    module: str
    root: int
    facts: Facts
    transposed: bool = True


@dataclass
class NormCall:
    """A norm that was called, and the facts of its input."""

    name: str
    facts: Facts
    width: int


@dataclass
class AttentionCall:
    """Facts of queries, keys and values that one attention was made of."""

    q: Facts
    k: Facts
    v: Facts


class Escape(NamedTuple):
    """An operation that no rule covers, its module, and a mask of the channels that it took."""

    operation: str
    module: str
    channels: Tensor


@dataclass
class Trace:
    """All that was seen, in order.

    Attributes:
        writers: where something was added to the residual stream, and its facts.
        escapes: what was done with a producer's output that no rule covers.
        pairs: the two channels that RoPE turns together, by producer: ``[C, 2]`` rows.
        experts: facts of stacked experts' inputs, by module.
    """

    reads: list[Read] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    attentions: list[AttentionCall] = field(default_factory=list)
    writers: list[tuple[str, Facts]] = field(default_factory=list)
    escapes: dict[str, list["Escape"]] = field(default_factory=dict)
    pairs: dict[str, Tensor] = field(default_factory=dict)
    experts: dict[str, Read] = field(default_factory=dict)
    called: list[str] = field(default_factory=list)


#: operations that move numbers and change none
MOVES = {
    *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze"),
    *("expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "clone"),
    *("alias", "detach", "narrow", "repeat", "repeat_interleave", "roll", "flip", "index_select"),
    *("contiguous", "unfold", "movedim", "swapaxes", "flatten", "unflatten", "lift_fresh"),
}
#: elementwise functions of one tensor
UNARY = {
    *("silu", "gelu", "sigmoid", "tanh", "exp", "pow", "clamp", "softplus", "erf", "sqrt"),
    *("rsqrt", "log", "abs", "square", "elu", "leaky_relu", "hardswish", "mish", "log_sigmoid"),
    *("clamp_min", "clamp_max", "sin", "cos", "reciprocal", "expm1", "log1p", "hardtanh", "relu6"),
    *("celu", "selu", "log_sigmoid_forward", "threshold"),
}
#: operations that take a tensor's shape and none of its numbers
CREATES = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones"),
    *("new_full", "new_empty_strided", "bernoulli", "rand_like"),
}
#: that a positive factor on the input passes through
POSITIVE = {"relu", "leaky_relu"}


class Recorder(TorchDispatchMode):
    """Records a :class:`Trace` while open."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self.facts: dict[int, Facts] = {}
        self.roots: dict[int, int] = {}
        #: the parameter that a tensor is, and whether it is transposed
        self.weights: dict[int, tuple[str, bool]] = {
            id(p): (name, False) for name, p in model.named_parameters(remove_duplicate=False)
        }
        self.modules = [""]
        self.muted = 0
        self._alive: list[Any] = []

    # what modules' hooks call

    def of(self, tensor: Tensor) -> Facts:
        """The facts of ``tensor``."""
        return self.facts.get(id(tensor), {})

    def set(self, tensor: Tensor, facts: Facts) -> None:
        """Give ``tensor`` these facts."""
        self._alive.append(tensor)
        self.facts[id(tensor)] = facts

    def produce(self, name: str, tensor: Tensor, *also: str) -> None:
        """``tensor [..., C]`` is the output of ``name``; it depends on ``also`` too."""
        with _disable_current_modes():
            channels = torch.arange(tensor.shape[-1], dtype=torch.int32).expand(tensor.shape)
            mixed = {other: Fact(None, Kind.MIXED) for other in also}
            self.set(tensor, mixed | {name: Fact(channels.contiguous(), Kind.LINEAR)})

    def root(self, tensor: Tensor) -> int:
        """A number that tensors share if they hold the same values in the same order."""
        self._alive.append(tensor)
        return self.roots.get(id(tensor), id(tensor))

    def escape(self, facts: Facts, what: str) -> None:
        """Note that values with ``facts`` go where no rule follows them."""
        for producer, fact in facts.items():
            if fact.kind < Kind.MIXED and fact.channels is not None:
                with _disable_current_modes():
                    mask = torch.zeros(int(fact.channels.max()) + 2, dtype=torch.bool)
                    mask[fact.channels.flatten().long()] = True  # -1 is the last
                    found = Escape(what, self.modules[-1], mask[:-1])
                self.trace.escapes.setdefault(producer, []).append(found)

    # operations

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.muted:
            with _disable_current_modes():
                self._record(func.overloadpacket.__name__, func, args, kwargs or {}, out)
        return out

    def _record(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if next(tensors_in(out), None) is None:
            return
        tensors = [t for t in tensors_in((args, kwargs)) if id(t) in self.facts]
        if isinstance(out, Tensor) and self._is_weight(name, args, out):
            return
        if not tensors or name in CREATES:
            return
        operation = name.rstrip("_") if not name.startswith("_") else name
        if name != operation and not name.startswith("_"):
            self._forget_views(args[0])
        if operation in ("_to_copy", "dropout", "native_dropout", "contiguous", "clone", "alias"):
            self._same(args[0], out if isinstance(out, Tensor) else out[0])
        elif operation in MOVES:
            self._move(operation, func, args, kwargs, out)
        elif operation in ("cat", "stack"):
            self._join(func, args, kwargs, out)
        elif operation in ("mm", "addmm", "bmm", "baddbmm"):
            self._multiply(operation, args, out)
        elif operation in ("mul", "div", "add", "sub", "rsub") and isinstance(out, Tensor):
            self._combine(operation, args, kwargs, out)
        elif operation.startswith("_scaled_dot_product"):
            self._attend(args[0], args[1], args[2], out)
        elif operation == "neg":
            self.set(out, self.of(args[0]))
        elif operation in ("sum", "mean") and self._reduced(args, kwargs, out):
            pass
        elif operation in POSITIVE | UNARY and isinstance(out, Tensor):
            kind = Kind.SCALED if operation in POSITIVE else Kind.ORDERED
            self.set(out, {p: self._weaker(p, f, kind) for p, f in self.of(args[0]).items()})
        elif operation == "index" and self._gathered(args, out):
            pass
        else:
            self._mix(operation, tensors, out)

    def _is_weight(self, name: str, args: tuple[Any, ...], out: Tensor) -> bool:
        """Note that ``out`` is a parameter, perhaps transposed or cast."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or id(first) not in self.weights:
            return False
        weight, transposed = self.weights[id(first)]
        turned = name == "t" or (name in ("transpose", "permute") and first.dim() == 2)
        if not turned and name not in ("_to_copy", "detach", "alias", "clone"):
            return False
        self._alive.append(out)
        self.weights[id(out)] = weight, transposed != turned
        return True

    def _same(self, tensor: Tensor, out: Tensor) -> None:
        root = self.root(tensor)
        self.set(out, self.of(tensor))
        self.roots[id(out)] = root

    def _move(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        source = args[0]
        if not isinstance(source, Tensor):
            return
        keeps = name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "detach")
        if keeps and out.numel() == source.numel():
            self.roots[id(out)] = self.root(source)
        function = torch.ops.aten.reshape if name in ("view", "_unsafe_view") else func
        results: list[Facts] = [{} for _ in (out if isinstance(out, (tuple, list)) else [out])]
        for producer, fact in self.of(source).items():
            if fact.channels is None:
                moved: Any = [None] * len(results)
            else:
                moved = function(fact.channels, *args[1:], **kwargs)
                moved = moved if isinstance(moved, (tuple, list)) else [moved]
            for facts, channels in zip(results, moved, strict=True):
                if channels is None or channels.numel() == 0 or int(channels.max()) >= 0:
                    facts[producer] = Fact(channels, fact.kind)
        for tensor, facts in zip(
            out if isinstance(out, (tuple, list)) else [out], results, strict=True
        ):
            self.set(tensor, facts)

    def _join(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> None:
        """``cat`` and ``stack``: elements that are another operand's have channel -1."""
        parts: list[Tensor] = args[0]
        producers = dict.fromkeys(p for part in parts for p in self.of(part))
        joined: Facts = {}
        for producer in producers:
            found = [self.of(part).get(producer) for part in parts]
            kinds = [fact.kind for fact in found if fact]
            if any(fact is not None and fact.channels is None for fact in found):
                joined[producer] = Fact(None, Kind.MIXED)
                continue
            none = [torch.full(part.shape, -1, dtype=torch.int32) for part in parts]
            channels = [
                f.channels if f and f.channels is not None else n
                for f, n in zip(found, none, strict=True)
            ]
            joined[producer] = Fact(func(channels, *args[1:], **kwargs), max(kinds))
        self.set(out, joined)

    def _multiply(self, name: str, args: tuple[Any, ...], out: Tensor) -> None:
        left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
        if name in ("addmm", "baddbmm"):
            self.escape(self.of(args[0]), name)
        if id(right) in self.weights:
            weight, transposed = self.weights[id(right)]
            read = Read(weight, self.modules[-1], self.root(left), self.of(left), transposed)
            self.trace.reads.append(read)
            self.produce(weight, out)
            return
        if SCORES in self.of(left) and self._scores:
            self._weigh(*self._scores.pop(), right, out)
            return
        facts = self.of(left), self.of(right)
        self._mix(name, [left, right], out)
        if all(any(p != SCORES for p in side) for side in facts):
            self._scores.append(facts)
            self.set(out, {SCORES: Fact(None, Kind.MIXED)})

    def _weigh(self, q: Facts, k: Facts, values: Tensor, out: Tensor) -> None:
        """``values [..., S, C]`` are summed over tokens, with coefficients of each head's own."""
        self.trace.attentions.append(AttentionCall(q, k, self.of(values)))
        weighed: Facts = {}
        for producer, fact in self.of(values).items():
            channels = fact.channels
            if channels is None or fact.kind == Kind.SUM or fact.kind > Kind.SCALED:
                self.escape({producer: fact}, "attention")
                weighed[producer] = Fact(None, Kind.MIXED)
            elif bool((channels == channels[..., :1, :]).all()):
                same = channels[..., :1, :].expand(out.shape).contiguous()
                weighed[producer] = Fact(same, max(fact.kind, Kind.HEADS))
        self.set(out, weighed)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, out: Any) -> None:
        """Attention as one operation."""
        result = out if isinstance(out, Tensor) else out[0]
        self._weigh(self.of(q), self.of(k), v, result)

    def _combine(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        """Sums and products of two operands."""
        a, b = args[:2]
        sides = [self._broadcast(x, out) if isinstance(x, Tensor) else {} for x in (a, b)]
        if name in ("add", "sub") and any(STREAM in side for side in sides):
            self._write(*sides, out=out)
            return
        combined: Facts = {}
        for side, other, operand in ((sides[0], sides[1], b), (sides[1], sides[0], a)):
            for producer, fact in side.items():
                if producer in combined:
                    continue
                if name == "mul" and producer in other and _apart(fact, other[producer]):
                    part = f"{producer}{PART}{int(fact.channels.min())}"  # type: ignore[union-attr]
                    kind = self._kind_of(name, fact, operand, {}, divisor=False)
                    combined[part] = self._weaker(producer, fact, kind)
                elif producer in other:
                    combined[producer] = self._with_itself(name, producer, fact, other[producer])
                else:
                    kind = self._kind_of(name, fact, operand, other, divisor=operand is a)
                    combined[producer] = self._weaker(producer, fact, kind)
        self.set(out, combined)

    def _kind_of(self, name: str, fact: Fact, operand: Any, other: Facts, *, divisor: bool) -> Kind:
        """What is left of ``fact`` once ``operand`` multiplies it or is added to it."""
        if name in ("mul", "div"):
            if name == "div" and divisor:
                return Kind.ORDERED
            return _coefficient(fact, operand)
        if not isinstance(operand, Tensor):
            return Kind.LINEAR if operand == 0 else Kind.ORDERED
        if other and fact.kind <= Kind.SUM and all(f.kind <= Kind.SUM for f in other.values()):
            return Kind.SUM
        return Kind.MIXED if other else Kind.ORDERED

    def _with_itself(self, name: str, producer: str, fact: Fact, other: Fact) -> Fact:
        """Two dependences on one producer: on one channel, or on a pair that RoPE turns."""
        a, b = fact.channels, other.channels
        if a is None or b is None:
            return Fact(None, Kind.MIXED)
        if torch.equal(a, b):
            linear = name in ("add", "sub") and max(fact.kind, other.kind) <= Kind.SCALED
            same = max(fact.kind, other.kind) if linear else Kind.ORDERED
            return self._weaker(producer, fact, same)
        if name in ("add", "sub") and max(fact.kind, other.kind) <= Kind.SCALED:
            self.trace.pairs[producer] = torch.stack([a.flatten(), b.flatten()], 1).unique(dim=0)
            return Fact(a, Kind.TURNED)
        self.escape({producer: fact}, name)
        return Fact(None, Kind.MIXED)

    def _write(self, a: Facts, b: Facts, *, out: Tensor) -> None:
        """Something is added to the residual stream."""
        stream, other = (a, b) if STREAM in a else (b, a)
        if STREAM in other:
            both = stream[STREAM], other[STREAM]
            kind = max(f.kind for f in both)
            self.trace.writers.append((self.modules[-1], {STREAM: Fact(None, Kind.MIXED)}))
            self.set(out, {STREAM: Fact(both[0].channels, max(kind, Kind.SUM))})
            return
        beside = {p: f for p, f in stream.items() if p != STREAM}
        self.trace.writers.append((self.modules[-1], beside | other))
        self.set(out, {STREAM: stream[STREAM]})

    def _broadcast(self, tensor: Tensor, out: Tensor) -> Facts:
        """The facts of ``tensor`` in the shape of ``out``."""
        if tensor.shape == out.shape:
            return self.of(tensor)
        spread: Facts = {}
        for producer, fact in self.of(tensor).items():
            if fact.channels is None:
                spread[producer] = fact
            elif tensor.dim() and tensor.shape[-1] == out.shape[-1] > 1:
                spread[producer] = Fact(fact.channels.expand(out.shape).contiguous(), fact.kind)
            else:  # one number for many channels: no channel of the result
                self.escape({producer: fact}, "broadcast")
        return spread

    def _weaker(self, producer: str, fact: Fact, kind: Kind) -> Fact:
        """``fact`` after an operation that leaves no more than ``kind`` of it."""
        if kind <= Kind.SUM or fact.channels is None:
            return Fact(fact.channels, max(fact.kind, kind))
        if fact.kind in (Kind.SUM, Kind.TURNED) or kind == Kind.MIXED:
            self.escape({producer: fact}, "sum")
            return Fact(None, Kind.MIXED)
        return Fact(fact.channels, max(fact.kind, kind))

    def _reduced(self, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> bool:
        """``sum`` over dimensions along which no channel changes (tokens, experts)."""
        dims = args[1] if len(args) > 1 else kwargs.get("dim")
        keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
        if not dims or not isinstance(out, Tensor):
            return False
        reduced: Facts = {}
        for producer, fact in self.of(args[0]).items():
            if fact.channels is None:
                reduced[producer] = fact
                continue
            least, most = (f(fact.channels, dims, keep) for f in (torch.amin, torch.amax))
            if not torch.equal(least, most):
                return False
            reduced[producer] = Fact(least, fact.kind)
        self.set(out, reduced)
        return True

    def _gathered(self, args: tuple[Any, ...], out: Any) -> bool:
        """``x[tokens]``: rows of tokens are chosen, no channel moves."""
        source, indices = args[:2]
        if not isinstance(source, Tensor):
            return False
        known = [None if i is None else getattr(i, "constant", None) for i in indices]
        if all((i is None) == (k is None) for i, k in zip(indices, known, strict=True)):
            moved = {
                p: Fact(None if f.channels is None else _index(f.channels, known), f.kind)
                for p, f in self.of(source).items()
            }
            self.set(out, moved)
            return True
        if len(indices) >= source.dim() or any(i is None for i in indices):
            return False
        gathered: Facts = {}
        for producer, fact in self.of(source).items():
            if fact.channels is None:
                gathered[producer] = fact
                continue
            row = fact.channels[(0,) * len(indices)]
            if not bool((fact.channels == row).all()):
                return False
            gathered[producer] = Fact(row.expand(out.shape).contiguous(), fact.kind)
        self.set(out, gathered)
        return True

    def _mix(self, name: str, tensors: list[Tensor], out: Any) -> None:
        """No rule: the result depends on all producers, on no channel of theirs."""
        mixed: Facts = {}
        for tensor in tensors:
            self.escape(self.of(tensor), name)
            mixed |= {p: Fact(None, Kind.MIXED) for p in self.of(tensor)}
        for result in tensors_in(out):
            self.set(result, mixed)

    def _forget_views(self, changed: Tensor) -> None:
        """An operation in place: other views of the memory hold something else now."""
        storage = changed.untyped_storage()._cdata
        for tensor in list(self._alive):
            if (
                isinstance(tensor, Tensor)
                and tensor is not changed
                and id(tensor) in self.facts
                and tensor.untyped_storage()._cdata == storage
            ):
                self.escape(self.facts[id(tensor)], "changed in place")
                self.facts[id(tensor)] = {p: Fact(None, Kind.MIXED) for p in self.facts[id(tensor)]}

    @property
    def _scores(self) -> list[tuple[Facts, Facts]]:
        found: list[tuple[Facts, Facts]] = self.__dict__.setdefault("_found_scores", [])
        return found


def _coefficient(fact: Fact, operand: Any) -> Kind:
    """How a product with ``operand`` changes what its other factor promises."""
    if not isinstance(operand, Tensor) or operand.numel() == 1 or fact.channels is None:
        return Kind.LINEAR
    channels = fact.channels
    shape = (1,) * (channels.dim() - operand.dim()) + tuple(operand.shape)
    along = [
        d
        for d, size in enumerate(shape)
        if size > 1 and not bool((channels.narrow(d, 0, 1) == channels).all())
    ]
    if not along:
        return Kind.LINEAR
    return Kind.SCALED if channels.dim() - 1 in along else Kind.HEADS


def _index(channels: Tensor, indices: list[Tensor | None]) -> Tensor:
    """``channels`` at indices whose numbers are known."""
    return channels[tuple(slice(None) if i is None else i for i in indices)]


def _apart(fact: Fact, other: Fact) -> bool:
    """Whether two facts of one producer take other channels of it, as gate and up in one linear."""
    a, b = fact.channels, other.channels
    return a is not None and b is not None and not bool(torch.isin(a.unique(), b.unique()).any())


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in ``value``, a nest of sequences and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
