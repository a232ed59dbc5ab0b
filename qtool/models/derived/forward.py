"""One forward of transformers' model of a config, recorded (:mod:`.recorder`)."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn

from qtool.errors import QtoolError, in_one_line
from qtool.models.derived.calls import Calls
from qtool.models.derived.numbers import AttentionAsProducts, RandomNumbers
from qtool.models.derived.passing import PASSED, Passing
from qtool.models.derived.recorded import IDS, SHAPE, Recorded
from qtool.models.derived.recorder import Recorder
from qtool.models.derived.trace import Trace
from qtool.models.skeleton import replaced_forwards


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
    """Names of the modules that are language models of the text config, the outermost first."""
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
        ids = few_ids(run)
        recorder.produce(IDS, ids)
        with (
            Calls(found, recorder, passing, names).watched(),
            _weights_watched(recorder, names),
            on_random_numbers(names),
            recorder,
        ):
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
def on_random_numbers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While open, a model on ``meta`` made of ``modules`` runs."""
    with torch.no_grad(), _short_chunks(modules), RandomNumbers(), AttentionAsProducts():
        yield


def few_ids(model: Any) -> Tensor:
    """Token ids of :data:`SHAPE`, none of them for padding, of which transformers would warn."""
    return torch.full(SHAPE, int(getattr(model.config, "pad_token_id", None) == 0))


@contextmanager
def _short_chunks(modules: Iterable[nn.Module]) -> Iterator[None]:
    """While open, scans pad their tokens to a few more, not to hundreds.

    A Mamba-2 scan multiplies matrices whose size is the square of a chunk's tokens, for each head
    and state.
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
    """While open, note linears whose weight is read outside their own forward.

    They are noted even if only the dtype of the weight is read, since a packed linear has no
    weight.
    """

    def found(module: nn.Module, attribute: str) -> Any:
        if attribute == "weight" and names.get(module, "") not in ("", recorder.modules[-1]):
            recorder.trace.asked.add(f"{names[module]}.weight")
        return nn.Module.__getattr__(module, attribute)

    nn.Linear.__getattr__ = found  # type: ignore[method-assign]
    try:
        yield
    finally:
        del nn.Linear.__getattr__


def _uses(trace: Trace, argument: str) -> bool:
    """Whether any value depends on what blocks handed on for ``argument``."""
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

    blocks = found.model.get_submodule(found.blocks)
    try:
        with replaced_forwards(dict.fromkeys(blocks, forward)), RandomNumbers():
            found.text_model(input_ids=few_ids(found.text_model), use_cache=False)
    except (ValueError, IndexError, TypeError, AttributeError):
        return False
    return True


def _blocks(model: Any, names: Mapping[nn.Module, str]) -> str:
    """The name of the module list of the decoder's blocks.

    It is the list nearest to the embedding of tokens in the tree of modules; if there are several,
    the list with the most parameters.
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
