"""Follows the calls of modules in a forward: where blocks, norms, embeddings and experts begin."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError
from qtool.models.derived.facts import STREAM, Kind
from qtool.models.derived.module_kinds import acts_linear, is_norm
from qtool.models.derived.passing import Passing
from qtool.models.derived.recorded import IDS, SHAPE, Recorded
from qtool.models.derived.recorder import Recorder
from qtool.models.derived.trace import NormCall, Read
from qtool.models.experts import is_experts
from qtool.models.skeleton import bound_arguments, replaced_forwards


class Calls:
    """Notes calls of modules while :meth:`watched`; norms and stacked experts are not looked into.

    Args:
        names: names of all modules.

    Attributes:
        numbers: numbers of the blocks.
        last: the value id of the last block's output; None before the first.
        norm_inputs: inputs of the norms that are running.
        muted: of the blocks that run.
        given_more: the kinds of which a block was recorded that was given more.
    """

    def __init__(
        self, found: Recorded, recorder: Recorder, passing: Passing, names: Mapping[nn.Module, str]
    ) -> None:
        self.found, self.recorder, self.passing, self.names = found, recorder, passing, names
        blocks: Any = found.model.get_submodule(found.blocks)
        self.numbers: dict[nn.Module, int] = {block: n for n, block in enumerate(blocks)}
        self.last: int | None = None
        # what a module computes is found out with numbers, of which a recording has none
        self.norms = {module for module in names if is_norm(module)}
        self.norm_inputs: list[Tensor] = []
        self.muted: list[bool] = []
        self.given_more: set[int] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calls while open."""
        experts = {m: partial(self._experts, n) for m, n in self.names.items() if is_experts(m)}
        with ExitStack() as opened:
            for module in self.names:
                acts_linear(module)  # caches the result, which needs numbers; below there are none
                opened.enter_context(
                    module.register_forward_pre_hook(self._enter, with_kwargs=True)
                )
                opened.enter_context(module.register_forward_hook(self._leave, with_kwargs=True))
            with replaced_forwards(experts):
                yield

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        recorder, name = self.recorder, self.names.get(module, "")
        recorder.modules.append(name)
        recorder.trace.called.append(name)
        if module in self.numbers:
            bound = bound_arguments(inspect.signature(module.forward), args, kwargs)
            self._enter_block(self.numbers[module], bound)
        if isinstance(module, nn.Embedding):
            if args and IDS in recorder.of(args[0]):
                self.found.reads_ids |= name != self.found.embedding
            recorder.muted += 1
        if module in self.norms and not recorder.muted and (given := [*args, *kwargs.values()]):
            self.norm_inputs.append(given[0])
            recorder.muted += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        recorder, name = self.recorder, self.recorder.modules.pop()
        if module in self.numbers:
            self._leave_block(name, out)
        elif module in self.norms and self.norm_inputs:
            self._leave_norm(name, out)
        elif isinstance(module, nn.Embedding):
            recorder.muted -= 1
            if not recorder.muted and isinstance(out, Tensor):
                recorder.produce(f"{name}.weight", out)
        elif not recorder.muted and isinstance(module, nn.Linear) and acts_linear(module):
            recorder.produce(f"{name}.weight", out)

    def _enter_block(self, number: int, bound: dict[str, Any]) -> None:
        """Begin a block: the first of its arguments is the residual stream."""
        found, recorder = self.found, self.recorder
        hidden = bound.pop(next(iter(bound)))
        if not isinstance(hidden, Tensor):
            kind = type(hidden).__name__
            raise QtoolError(f"a block's first argument is a {kind}, no hidden states")
        if self.last is None:
            found.start = recorder.of(hidden)
        elif recorder.value_id(hidden) != self.last:
            found.impure = "what enters a block is not what the one before gave"
        found.width = hidden.numel() // prod(SHAPE)
        recorder.produce(STREAM, hidden)
        like, passed = found.like[number], self.passing.enter(bound)
        unlike = passed and like not in self.given_more  # the first of its kind may get nothing
        self.given_more.update([like] * passed)
        self.muted.append(number != like and not unlike)
        recorder.muted += self.muted[-1]

    def _leave_block(self, name: str, out: Any) -> None:
        recorder, several = self.recorder, isinstance(out, (tuple, list))
        result = out[0] if several else out
        stream = recorder.of(result).get(STREAM)
        if not self.muted[-1] and (stream is None or stream.kind > Kind.SUM):
            recorder.trace.changing.add(name)
        self.found.outputs = len(out) if several else 0
        self.last = recorder.value_id(result)
        others = {p: f for p, f in recorder.of(result).items() if p != STREAM}
        recorder.escape(others, "the block's output")
        if self.muted.pop():
            recorder.muted -= 1
            recorder.produce(STREAM, result)
        self.passing.leave(tuple(out) if self.found.outputs else (out,))

    def _leave_norm(self, name: str, out: Any) -> None:
        recorder, x = self.recorder, self.norm_inputs.pop()
        recorder.muted -= 1
        facts = recorder.of(x)
        result = out[0] if isinstance(out, tuple) else out
        recorder.trace.norms.append(NormCall(name, facts, recorder.value_id(result)))
        if STREAM in facts:
            recorder.set(x, facts | {STREAM: facts[STREAM]._replace(factor=1.0)})
        inner = () if STREAM in facts else tuple(facts)
        recorder.produce(name, result, *inner)

    def _experts(self, name: str, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The forward of the stacked experts ``name``."""
        recorder = self.recorder
        if args and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            self.found.active_experts = args[0].shape[-1]
        out = torch.empty_like(hidden)
        if not recorder.muted:
            read = Read(name, name, recorder.value_id(hidden), recorder.of(hidden))
            recorder.trace.experts[name] = read
            recorder.produce(name, out)
        return out
