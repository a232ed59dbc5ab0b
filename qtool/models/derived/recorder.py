"""Follows channels through one forward of a model on ``meta``: what reads what, and how.

The package docstring defines the terms. Operations that move numbers (view, transpose, slice, cat,
...) are replayed on the channel numbers of a tensor's facts; elementwise ones weaken the kind; all
others end a fact, and its producer's channels escape. So a statement such as "down's input is
``act(gate) * up`` in up's order" is proved by the operations of the forward, whatever the modules
are called. An operation that no rule covers proves nothing.

Legend: B sequences, S tokens, C channels.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from qtool.errors import QtoolError
from qtool.models.derived.arithmetic import POSITIVE, UNARY, combine
from qtool.models.derived.facts import Fact, Facts, Kind
from qtool.models.derived.moves import MOVES, gathered, join, move, reduced
from qtool.models.derived.products import attend, multiply
from qtool.models.derived.trace import Escape, Trace

#: operations that take a tensor's shape and none of its numbers
CREATES = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones"),
    *("new_full", "new_empty_strided", "bernoulli", "rand_like"),
}
#: operations that draw random numbers
DRAWS = {"rand", "randn", "randint", "multinomial"}


class Recorder(TorchDispatchMode):
    """Records a :class:`Trace` while open."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = Trace()
        self.facts: dict[int, Facts] = {}
        self.value_ids: dict[int, int] = {}
        #: by tensor, the parameter that it is, and whether it is transposed
        self.weights: dict[int, tuple[str, bool]] = {
            id(p): (name, False) for name, p in model.named_parameters(remove_duplicate=False)
        }
        self.modules = [""]
        self.muted = 0
        #: all tensors that are known by their ``id``, which must not become another tensor's
        self._alive: list[Any] = []
        #: facts of queries and keys whose product has not been multiplied by values
        self.scores: list[tuple[Facts, Facts]] = []

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

    def value_id(self, tensor: Tensor) -> int:
        """A number that tensors share if they hold the same values in the same order.

        Reshapes, casts and copies keep it; the result of any other operation has its own.
        """
        self._alive.append(tensor)
        return self.value_ids.get(id(tensor), id(tensor))

    def escape(self, facts: Facts, what: str) -> None:
        """Note that values with ``facts`` go where no rule follows them."""
        for producer, fact in facts.items():
            if fact.kind < Kind.MIXED and fact.channels is not None and fact.channels.numel():
                with _disable_current_modes():
                    mask = torch.zeros(int(fact.channels.max()) + 2, dtype=torch.bool)
                    mask[fact.channels.flatten().long()] = True  # -1 is the last
                    found = Escape(what, self.modules[-1], mask[:-1])
                self.trace.escapes.setdefault(producer, []).append(found)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if not self.muted and name in DRAWS:
            raise QtoolError("it draws random numbers, so that two runs differ")
        out = func(*args, **(kwargs or {}))
        if not self.muted:
            with _disable_current_modes():
                self._record(name, func, args, kwargs or {}, out)
        return out

    def _record(
        self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        if next(tensors_in(out), None) is None:
            return
        if func._schema.is_mutable and id(args[0]) in self.weights:
            self.trace.changed.add(self.weights[id(args[0])][0])
        tensors = [t for t in tensors_in((args, kwargs)) if id(t) in self.facts]
        if isinstance(out, Tensor) and self._is_weight(name, args, out):
            return
        if not tensors or name in CREATES:
            return
        operation = name if name.startswith("_") else name.rstrip("_")
        if name != operation:  # add_ and such change their tensor in place
            self._forget_views(args[0])
        if not self._follow(operation, func, args, kwargs, out):
            self.mix(operation, tensors, out)

    def _follow(
        self, operation: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> bool:
        """Give ``out`` its facts by the rule of ``operation``; False if no rule applies."""
        if operation in ("_to_copy", "dropout", "native_dropout", "contiguous", "clone", "alias"):
            result = out if isinstance(out, Tensor) else out[0]
            self.set(result, self.of(args[0]))
            self.value_ids[id(result)] = self.value_id(args[0])
        elif operation in MOVES:
            move(self, operation, func, args, kwargs, out)
        elif operation in ("cat", "stack"):
            join(self, func, args, kwargs, out)
        elif operation in ("mm", "addmm", "bmm", "baddbmm"):
            multiply(self, operation, args, out)
        elif operation in ("mul", "div", "add", "sub", "rsub") and len(args) == 2 and not kwargs:
            combine(self, operation, *args, out)
        elif operation.startswith("_scaled_dot_product"):
            attend(self, args[0], args[1], args[2], out)
        elif operation == "neg":
            self.set(out, self.of(args[0]))
        elif operation in POSITIVE | UNARY and isinstance(out, Tensor):
            kind = Kind.SCALED if operation in POSITIVE else Kind.ORDERED
            self.set(out, {p: self.weaker(p, f, kind) for p, f in self.of(args[0]).items()})
        elif operation in ("sum", "mean"):
            return reduced(self, args, kwargs, out)
        elif operation == "index":
            return gathered(self, args, out)
        else:
            return False
        return True

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

    def mix(self, name: str, tensors: list[Tensor], out: Any) -> None:
        """No rule applies: the result depends on all producers, but on no known channel."""
        mixed: Facts = {}
        for tensor in tensors:
            self.escape(self.of(tensor), name)
            mixed |= {p: Fact(None, Kind.MIXED) for p in self.of(tensor)}
        for result in tensors_in(out):
            self.set(result, mixed)

    def weaker(self, producer: str, fact: Fact, kind: Kind) -> Fact:
        """``fact`` after an operation that weakens its kind to at least ``kind``."""
        if kind <= Kind.SUM or fact.channels is None:
            return fact._replace(kind=max(fact.kind, kind))
        if fact.kind in (Kind.SUM, Kind.TURNED) or kind == Kind.MIXED:
            self.escape({producer: fact}, "sum")
            return Fact(None, Kind.MIXED)
        return fact._replace(kind=max(fact.kind, kind))

    def _forget_views(self, changed: Tensor) -> None:
        """Drop the facts of other views of memory that an operation changed in place."""
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


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in ``value``, a nest of sequences and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
