"""Rules for elementwise operations: they weaken the kind of a fact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtool.models.derived.facts import PART, STREAM, Fact, Facts, Kind

if TYPE_CHECKING:
    from qtool.models.derived.recorder import Recorder

#: elementwise functions of one tensor
UNARY = {
    *("silu", "gelu", "sigmoid", "tanh", "exp", "pow", "clamp", "softplus", "erf", "sqrt"),
    *("rsqrt", "log", "abs", "square", "elu", "leaky_relu", "hardswish", "mish", "log_sigmoid"),
    *("clamp_min", "clamp_max", "sin", "cos", "reciprocal", "expm1", "log1p", "hardtanh", "relu6"),
    *("celu", "selu", "log_sigmoid_forward", "threshold"),
}
#: functions that a positive factor on the input passes through
POSITIVE = {"relu", "leaky_relu"}


def combine(recorder: Recorder, name: str, a: Any, b: Any, out: Tensor) -> None:
    """Sums and products of two operands."""
    sides = [broadcast(recorder, x, out) if isinstance(x, Tensor) else {} for x in (a, b)]
    if name not in ("mul", "div") and any(STREAM in side for side in sides):
        write(recorder, *sides, out=out, sign=1.0 if name == "add" else -1.0)
        return
    combined: Facts = {}
    for side, other, operand in ((sides[0], sides[1], b), (sides[1], sides[0], a)):
        for producer, fact in side.items():
            if producer in combined:
                continue
            if producer not in other:
                own = _with_others(recorder, name, producer, fact, operand, other, operand is a)
                combined[producer] = own
            elif name == "mul" and _apart(fact, other[producer]):
                part = f"{producer}{PART}{int(fact.channels.min())}"  # type: ignore[union-attr]
                kind = kind_of(name, fact, operand, {}, divisor=False)
                combined[part] = recorder.weaker(producer, fact, kind)
            else:
                combined[producer] = with_itself(recorder, name, producer, fact, other[producer])
    recorder.set(out, combined)


def _with_others(
    recorder: Recorder,
    name: str,
    producer: str,
    fact: Fact,
    operand: Any,
    other: Facts,
    divisor: bool,
) -> Fact:
    """``fact`` after an operation with ``operand``, whose facts are ``other``: no ``producer``'s.

    ``divisor``: ``fact`` is of the value that divides ``operand``, if one divides the other.
    """
    kind = kind_of(name, fact, operand, other, divisor=divisor)
    unknown = not other and isinstance(operand, Tensor) and operand.numel() > 1
    own_bias = producer == f"{recorder.modules[-1]}.weight"
    if unknown and not own_bias and kind in (Kind.SCALED, Kind.ORDERED):
        recorder.trace.unordered.add(producer)
    combined = recorder.weaker(producer, fact, kind)
    if name == "mul" or (name == "div" and not divisor):
        return combined._replace(factor=multiplied(combined.factor, operand, name))
    return combined


def kind_of(name: str, fact: Fact, operand: Any, other: Facts, *, divisor: bool) -> Kind:
    """The kind of ``fact`` after ``operand`` multiplies the value or is added to it."""
    if name == "div" and divisor:
        return Kind.ORDERED
    if name in ("mul", "div"):
        return _coefficient(fact, operand)
    if not isinstance(operand, Tensor):
        return Kind.LINEAR if operand == 0 else Kind.ORDERED
    if other and fact.kind <= Kind.SUM and all(f.kind <= Kind.SUM for f in other.values()):
        return Kind.SUM
    return Kind.MIXED if other else Kind.ORDERED


def with_itself(recorder: Recorder, name: str, producer: str, fact: Fact, other: Fact) -> Fact:
    """Join two facts of one producer: of one channel, or of a pair that RoPE turns."""
    a, b = fact.channels, other.channels
    if a is None or b is None:
        return Fact(None, Kind.MIXED)
    linear = name in ("add", "sub") and max(fact.kind, other.kind) <= Kind.SCALED
    if torch.equal(a, b):
        same = max(fact.kind, other.kind) if linear else Kind.ORDERED
        return recorder.weaker(producer, fact, same)._replace(factor=1.0)
    if linear:
        recorder.trace.pairs[producer] = torch.stack([a.flatten(), b.flatten()], 1).unique(dim=0)
        return Fact(a, Kind.TURNED)
    recorder.escape({producer: fact}, name)
    return Fact(None, Kind.MIXED)


def write(recorder: Recorder, a: Facts, b: Facts, *, out: Tensor, sign: float) -> None:
    """Note that one operand is added to the residual stream, which is the other.

    ``sign`` is -1 if one of the two is subtracted.
    """
    stream, other = (dict(a), b) if STREAM in a else (dict(b), a)
    if STREAM in other:
        both = stream[STREAM], other[STREAM]
        kind = max(f.kind for f in both)
        recorder.trace.writers.append((recorder.modules[-1], {STREAM: Fact(None, Kind.MIXED)}))
        recorder.set(out, {STREAM: Fact(both[0].channels, max(kind, Kind.SUM))})
        return
    own = stream.pop(STREAM)
    written = {p: f._replace(factor=sign * f.factor / own.factor) for p, f in other.items()}
    recorder.trace.writers.append((recorder.modules[-1], stream | written))
    recorder.set(out, {STREAM: own._replace(factor=1.0)})


def broadcast(recorder: Recorder, tensor: Tensor, out: Tensor) -> Facts:
    """The facts of ``tensor`` in the shape of ``out``."""
    if tensor.shape == out.shape:
        return recorder.of(tensor)
    spread: Facts = {}
    for producer, fact in recorder.of(tensor).items():
        if fact.channels is None:
            spread[producer] = fact
        elif tensor.dim() and tensor.shape[-1] == out.shape[-1] > 1:
            channels = fact.channels.expand(out.shape).contiguous()
            spread[producer] = fact._replace(channels=channels)
        else:  # one number for many channels: no channel of the result
            recorder.escape({producer: fact}, "broadcast")
    return spread


def multiplied(factor: float, operand: Any, name: str) -> float:
    """``factor`` of a value that ``operand`` multiplies (``mul``) or divides (``div``)."""
    if isinstance(operand, Tensor) and (operand.is_meta or operand.numel() > 1):
        return factor
    number = float(operand) or 1.0
    return factor * number if name == "mul" else factor / number


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


def _apart(fact: Fact, other: Fact) -> bool:
    """Whether two facts of one producer take other channels of it, as gate and up in one linear."""
    a, b = fact.channels, other.channels
    return a is not None and b is not None and not bool(torch.isin(a.unique(), b.unique()).any())
