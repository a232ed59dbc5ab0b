"""Rules for operations that move numbers: they are replayed on the channel numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qtool.models.derived.facts import Fact, Facts, Kind

if TYPE_CHECKING:
    from qtool.models.derived.recorder import Recorder

#: operations that move numbers and change none
MOVES = {
    *("view", "_unsafe_view", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze"),
    *("expand", "slice", "select", "split", "split_with_sizes", "chunk", "unbind"),
    *("detach", "narrow", "repeat", "repeat_interleave", "roll", "flip", "index_select"),
    *("unfold", "movedim", "swapaxes", "flatten", "unflatten", "lift_fresh"),
}


def move(
    recorder: Recorder,
    name: str,
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
) -> None:
    """An operation of :data:`MOVES`, replayed on the channel numbers of its operand."""
    source = args[0]
    keeps = name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "detach")
    if keeps and out.numel() == source.numel():
        recorder.value_ids[id(out)] = recorder.value_id(source)
    function = torch.ops.aten.reshape if name in ("view", "_unsafe_view") else func
    outputs = out if isinstance(out, (tuple, list)) else [out]
    results: list[Facts] = [{} for _ in outputs]
    for producer, fact in recorder.of(source).items():
        if fact.channels is None:
            moved: Any = [None] * len(outputs)
        else:
            moved = function(fact.channels, *args[1:], **kwargs)
            moved = moved if isinstance(moved, (tuple, list)) else [moved]
        for facts, channels in zip(results, moved, strict=True):
            if channels is None or channels.numel() == 0 or int(channels.max()) >= 0:
                facts[producer] = fact._replace(channels=channels)
    for tensor, facts in zip(outputs, results, strict=True):
        recorder.set(tensor, facts)


def join(
    recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> None:
    """``cat`` and ``stack``: in an operand's facts, elements of other operands have channel -1."""
    parts: list[Tensor] = args[0]
    producers = dict.fromkeys(p for part in parts for p in recorder.of(part))
    joined: Facts = {}
    for producer in producers:
        found = [recorder.of(part).get(producer) for part in parts]
        kinds = [fact.kind for fact in found if fact]
        factors = {fact.factor for fact in found if fact}
        if any(fact is not None and fact.channels is None for fact in found):
            joined[producer] = Fact(None, Kind.MIXED)
            continue
        none = [torch.full(part.shape, -1, dtype=torch.int32) for part in parts]
        channels = [
            f.channels if f and f.channels is not None else n
            for f, n in zip(found, none, strict=True)
        ]
        factor = factors.pop() if len(factors) == 1 else 1.0
        joined[producer] = Fact(func(channels, *args[1:], **kwargs), max(kinds), factor)
    recorder.set(out, joined)


def reduced(recorder: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> bool:
    """``sum`` over dimensions along which no channel changes (tokens, experts)."""
    dims = args[1] if len(args) > 1 else kwargs.get("dim")
    keep = args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if not dims:
        return False
    found: Facts = {}
    for producer, fact in recorder.of(args[0]).items():
        if fact.channels is None:
            found[producer] = fact
            continue
        least, most = (f(fact.channels, dims, keep) for f in (torch.amin, torch.amax))
        if not torch.equal(least, most):
            return False
        found[producer] = fact._replace(channels=least)
    recorder.set(out, found)
    return True


def gathered(recorder: Recorder, args: tuple[Any, ...], out: Tensor) -> bool:
    """``x[tokens]``: rows of tokens are chosen, no channel moves."""
    source, indices = args[:2]
    known = [None if i is None or i.is_meta else i for i in indices]
    if all((i is None) == (k is None) for i, k in zip(indices, known, strict=True)):
        moved = {
            p: f._replace(channels=None if f.channels is None else _index(f.channels, known))
            for p, f in recorder.of(source).items()
        }
        recorder.set(out, moved)
        return True
    if len(indices) >= source.dim() or any(i is None for i in indices):
        return False
    found: Facts = {}
    for producer, fact in recorder.of(source).items():
        if fact.channels is None:
            found[producer] = fact
            continue
        row = fact.channels[(0,) * len(indices)]
        if not bool((fact.channels == row).all()):
            return False
        found[producer] = fact._replace(channels=row.expand(out.shape).contiguous())
    recorder.set(out, found)
    return True


def _index(channels: Tensor, indices: list[Tensor | None]) -> Tensor:
    """``channels`` at indices whose numbers are known."""
    return channels[tuple(slice(None) if i is None else i for i in indices)]
