"""One forward of transformers' model of a config, recorded (:mod:`.recorder`)."""

import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError, in_one_line
from qtool.models.derived.facts import STREAM, Facts
from qtool.models.derived.module_kinds import acts_linear, is_norm
from qtool.models.derived.numbers import AttentionAsProducts, RandomNumbers
from qtool.models.derived.passing import PASSED, Passing
from qtool.models.derived.recorder import Recorder
from qtool.models.derived.trace import NormCall, Read, Trace
from qtool.models.experts import is_experts
from qtool.models.skeleton import bound_arguments

#: the producer of the token ids
IDS = "token ids"
#: sequences and tokens of the forward
SHAPE = 1, 4


@dataclass
class Recorded:
    """A model on ``meta`` and what one forward of it did.

    Attributes:
        text: the name of the module that was run, :attr:`~qtool.models.family.Family.text`.
        blocks: the module list of its blocks. embedding, head: the modules' names.
        start: facts of what enters the first block.
        outputs: how long a tuple the blocks return; 0 for a bare tensor.
        passes: what else blocks use of those before, as :attr:`~qtool.models.family.Family.passes`.
        handed: the most of it that a block was given. width: numbers a token of the hidden states.
        impure: why a block's arguments depend on earlier blocks, if they do.
        like: for each block the first one of the same modules and settings, which alone is
            recorded.
        reads_ids: more than the embedding reads the token ids.
        active_experts: how many experts a token goes to; 0 where there are none.
    """

    model: Any
    text: str
    trace: Trace
    blocks: str
    embedding: str
    head: str
    start: Facts = field(default_factory=dict)
    outputs: int = 0
    passes: dict[str, int] = field(default_factory=dict)
    handed: list[Tensor] = field(default_factory=list)
    width: int = 0
    impure: str = ""
    like: list[int] = field(default_factory=list)
    reads_ids: bool = False
    active_experts: int = 0

    @property
    def config(self) -> Any:
        """The config of the text model."""
        return self.text_model.config.get_text_config(decoder=True)

    @property
    def text_model(self) -> Any:
        """The module that was run."""
        return self.model.get_submodule(self.text)


def record(model: Any) -> Recorded:
    """Run ``model``, or the part of it that takes text alone, on a few tokens and record it.

    Raises:
        QtoolError: it has no list of blocks, or its forward fails.
    """
    refusals = []
    for text in _text_models(model):
        try:
            return _recorded(model, text)
        except QtoolError as error:
            refusals.append(error)
    if refusals:
        raise refusals[0]
    raise QtoolError(f"{type(model).__name__} has no head that makes logits of hidden states")


def _text_models(model: Any) -> Iterator[str]:
    """Names of what in ``model`` is a language model of its text config, the outermost first."""
    from transformers import PreTrainedModel

    kind = type(model.config.get_text_config(decoder=True))
    for name, module in model.named_modules():
        if not isinstance(module, PreTrainedModel) or module.get_output_embeddings() is None:
            continue
        if type(module.config.get_text_config(decoder=True)) is kind:
            yield name


def _recorded(model: Any, text: str) -> Recorded:
    """The forward of the part ``text`` of ``model``."""
    names = {module: name for name, module in model.named_modules()}
    recorder = Recorder(model)
    run = model.get_submodule(text)
    blocks = _blocks(run, {module: names[module] for module in run.modules()})
    found = Recorded(
        model,
        text,
        recorder.trace,
        blocks,
        names[run.get_input_embeddings()],
        names[run.get_output_embeddings()],
    )
    found.like = _alike(run, model.get_submodule(blocks))
    passing = Passing(recorder, blocks)
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(_Calls(found, recorder, passing, names).watched())
            stack.enter_context(_short_chunks(names))
            stack.enter_context(_weights_watched(recorder, names))
            stack.enter_context(RandomNumbers())
            stack.enter_context(AttentionAsProducts())
            ids = torch.zeros(SHAPE, dtype=torch.long)
            recorder.produce(IDS, ids)
            stack.enter_context(recorder)
            run(input_ids=ids, use_cache=False)
        found.reads_ids |= IDS in recorder.trace.escapes
        used = [name for name in passing.places if _uses(found.trace, name)]
        found.passes = {name: passing.places[name] for name in used}
        found.handed = [tensor for name in used for tensor in passing.handed[name]]
        found.impure = found.impure or passing.impure
        if found.outputs > 1 and not _takes_first(found):
            found.impure = "its blocks return more than the hidden states"
    except Exception as error:
        raise QtoolError(
            f"the forward of {type(run).__name__} cannot be followed "
            f"({in_one_line(error)} in {recorder.modules[-1] or 'the model'})"
        ) from error
    return found


@contextmanager
def _short_chunks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Scans pad their tokens to few more than there are while open, and not to hundreds.

    A Mamba-2 scan multiplies matrices of a chunk's tokens squared, by heads and states.
    """
    kept = [(m, m.chunk_size) for m in modules if type(getattr(m, "chunk_size", None)) is int]
    for module, _ in kept:
        module.chunk_size = 2 * SHAPE[1]  # type: ignore[assignment]
    try:
        yield
    finally:
        for module, size in kept:
            module.chunk_size = size


@contextmanager
def _weights_watched(recorder: Recorder, names: Mapping[nn.Module, str]) -> Iterator[None]:
    """Note linears whose weight is asked for outside their own forward while open.

    They are noted also where only its dtype is of interest: a packed linear has no weight.
    """

    def found(module: nn.Module, attribute: str) -> Any:
        if attribute == "weight" and names.get(module, "") not in ("", recorder.modules[-1]):
            recorder.trace.asked.add(f"{names[module]}.weight")
        return nn.Module.__getattr__(module, attribute)

    nn.Linear.__getattr__ = found  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del nn.Linear.__getattr__


def _uses(trace: Trace, argument: str) -> bool:
    """Whether anything was made of what blocks handed on for ``argument``."""
    producer = PASSED + argument
    used = [read.facts for read in (*trace.reads, *trace.experts.values())]
    used += [call.facts for call in trace.norms] + [facts for _, facts in trace.writers]
    used += [side for call in trace.attentions for side in (call.q, call.k, call.v)]
    return producer in trace.escapes or any(producer in facts for facts in used)


@torch.no_grad()
def _takes_first(found: Recorded) -> bool:
    """Whether the model runs with blocks that return nothing beside their hidden states."""

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        return hidden, *(None,) * (found.outputs - 1)

    modules: Any = found.model.get_submodule(found.blocks)
    try:
        for block in modules:
            block.forward = forward
        with RandomNumbers():
            found.text_model(input_ids=torch.zeros(SHAPE, dtype=torch.long), use_cache=False)
    except (ValueError, IndexError, TypeError, AttributeError):
        return False
    finally:
        for block in modules:
            block.__dict__.pop("forward", None)
    return True


def _blocks(model: Any, names: Mapping[nn.Module, str]) -> str:
    """The name of the module list of the decoder's blocks.

    It is the one nearest to the embedding of tokens among modules; of several the one with the most
    parameters.
    """
    config = model.config.get_text_config(decoder=True)
    if not hasattr(config, "num_hidden_layers"):
        raise QtoolError(
            f"the config of {type(model).__name__} has no num_hidden_layers, a number of blocks "
            "that qtool could quantize one after another"
        )
    counts = {config.num_hidden_layers, getattr(config, "num_layers", None)}
    sizes = {
        name: sum(p.numel() for p in module.parameters())
        for module, name in names.items()
        if isinstance(module, nn.ModuleList) and len(module) in counts
    }
    if not sizes:
        raise QtoolError(
            f"{type(model).__name__} has no list of {config.num_hidden_layers} blocks, which is "
            "what qtool quantizes one after another"
        )
    outermost = [n for n in sizes if not any(n.startswith(f"{o}.") for o in sizes)]
    embedding = names[model.get_input_embeddings()].split(".")

    def steps(name: str) -> int:
        parts = name.split(".")
        shared = takewhile(lambda pair: pair[0] == pair[1], zip(embedding, parts, strict=False))
        return len(embedding) + len(parts) - 2 * len(list(shared))

    return min(outermost, key=lambda name: (steps(name), -sizes[name]))


def _alike(model: Any, blocks: Any) -> list[int]:
    """For each block the first one with the same modules, shapes and settings."""
    types = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    firsts: dict[Any, int] = {}
    found = []
    for number, block in enumerate(blocks):
        shapes = tuple((name, tuple(t.shape)) for name, t in block.state_dict().items())
        settings = tuple(
            (name, type(module), key, value)
            for name, module in block.named_modules()
            for key, value in sorted(vars(module).items())
            if isinstance(value, (int, float, str, type(None)))
            and not any(part in key for part in ("idx", "index", "layer_id", "layer_number"))
        )
        key = shapes, settings, types[number] if number < len(types) else None
        found.append(firsts.setdefault(key, number))
    return found


class _Calls:
    """Notes calls of modules while :meth:`watched`; norms and stacked experts are not looked into.

    Args:
        names: of all modules.

    Attributes:
        numbers: of the blocks. last: the root of the last block's output; None before the first.
        norm_inputs: of the norms that run. muted: of the blocks that run.
        given_more: the kinds of which a block was recorded that was given more.
    """

    def __init__(
        self, found: Recorded, recorder: Recorder, passing: Passing, names: Mapping[nn.Module, str]
    ) -> None:
        self.found, self.recorder, self.passing, self.names = found, recorder, passing, names
        blocks: Any = found.model.get_submodule(found.blocks)
        self.numbers: dict[nn.Module, int] = {block: n for n, block in enumerate(blocks)}
        self.last: int | None = None
        self.norm_inputs: list[Tensor] = []
        self.muted: list[bool] = []
        self.given_more: set[int] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calls while open."""
        handles = []
        for module, name in self.names.items():
            acts_linear(module)  # cached: it is found with numbers, which there are none of below
            handles += [
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, with_kwargs=True),
            ]
            if is_experts(module):
                module.forward = partial(self._experts, name)  # type: ignore[method-assign]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for module in self.names:
                module.__dict__.pop("forward", None)

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
        if is_norm(module) and not recorder.muted and (given := [*args, *kwargs.values()]):
            self.norm_inputs.append(given[0])
            recorder.muted += 1

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        recorder, name = self.recorder, self.recorder.modules.pop()
        if module in self.numbers:
            self._leave_block(out)
        elif is_norm(module) and self.norm_inputs:
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
        elif recorder.root(hidden) != self.last:
            found.impure = "what enters a block is not what the one before gave"
        found.width = hidden.numel() // prod(SHAPE)
        recorder.produce(STREAM, hidden)
        like, passed = found.like[number], self.passing.enter(bound)
        unlike = passed and like not in self.given_more  # the first of its kind may get nothing
        self.given_more.update([like] * passed)
        self.muted.append(number != like and not unlike)
        recorder.muted += self.muted[-1]

    def _leave_block(self, out: Any) -> None:
        recorder, several = self.recorder, isinstance(out, (tuple, list))
        result = out[0] if several else out
        self.found.outputs = len(out) if several else 0
        self.last = recorder.root(result)
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
        recorder.trace.norms.append(NormCall(name, facts))
        if STREAM in facts:
            recorder.set(x, facts | {STREAM: facts[STREAM]._replace(factor=1.0)})
        inner = () if STREAM in facts else tuple(facts)
        recorder.produce(name, out[0] if isinstance(out, tuple) else out, *inner)

    def _experts(self, name: str, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The forward of the stacked experts ``name``."""
        recorder = self.recorder
        if args and isinstance(args[0], Tensor) and not args[0].is_floating_point():
            self.found.active_experts = args[0].shape[-1]
        if not recorder.muted:
            read = Read(name, name, recorder.root(hidden), recorder.of(hidden))
            recorder.trace.experts[name] = read
        out = torch.empty_like(hidden)
        if not recorder.muted:
            recorder.produce(name, out)
        return out
