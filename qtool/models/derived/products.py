"""Rules for matrix products: linears, and attention as two products or as one operation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from qtool.models.derived.facts import ATTENTION, SCORES, Fact, Facts, Kind
from qtool.models.derived.trace import AttentionCall, Read

if TYPE_CHECKING:
    from qtool.models.derived.recorder import Recorder


def multiply(recorder: Recorder, name: str, args: tuple[Any, ...], out: Tensor) -> None:
    """A product of two matrices: a linear map, scores, or scores times values."""
    left, right = args[-2:] if name in ("mm", "bmm") else args[1:3]
    if name in ("addmm", "baddbmm"):
        recorder.escape(recorder.of(args[0]), name)
    if id(right) in recorder.weights:
        weight, transposed = recorder.weights[id(right)]
        read = Read(
            weight, recorder.modules[-1], recorder.value_id(left), recorder.of(left), transposed
        )
        recorder.trace.reads.append(read)
        recorder.produce(weight, out)
        return
    if SCORES in recorder.of(left) and recorder.scores:
        weigh(recorder, *recorder.scores.pop(), recorder.of(right), out)
        return
    facts = recorder.of(left), recorder.of(right)
    scores = all(any(p != SCORES for p in side) for side in facts)
    recorder.mix(ATTENTION if scores else name, [left, right], out)
    if scores:
        recorder.scores.append(facts)
        recorder.set(out, {SCORES: Fact(None, Kind.MIXED)})


def weigh(recorder: Recorder, q: Facts, k: Facts, values: Facts, out: Tensor) -> None:
    """``values [..., S, C]`` are summed over tokens, with different coefficients for each head."""
    recorder.trace.attentions.append(AttentionCall(q, k, values))
    weighed: Facts = {}
    for producer, fact in values.items():
        channels = fact.channels
        if channels is None or fact.kind == Kind.SUM or fact.kind > Kind.SCALED:
            recorder.escape({producer: fact}, ATTENTION)
            weighed[producer] = Fact(None, Kind.MIXED)
        elif bool((channels == channels[..., :1, :]).all()):
            same = channels[..., :1, :].expand(out.shape).contiguous()
            weighed[producer] = Fact(same, max(fact.kind, Kind.HEADS))
    recorder.set(out, weighed)


def attend(recorder: Recorder, q: Tensor, k: Tensor, v: Tensor, out: Any) -> None:
    """Attention as one operation."""
    result = out if isinstance(out, Tensor) else out[0]
    facts = recorder.of(q), recorder.of(k)
    for side in facts:
        recorder.escape(side, ATTENTION)
    values, repeats = dict(recorder.of(v)), result.shape[1] // v.shape[1]
    for producer, fact in values.items():
        if fact.channels is not None and repeats > 1:  # kv heads that it repeats itself
            values[producer] = fact._replace(channels=fact.channels.repeat_interleave(repeats, 1))
    weigh(recorder, *facts, values, result)
