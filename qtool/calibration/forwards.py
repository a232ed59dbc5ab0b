"""Forwards of a block: its outputs, and the inputs of its linears.

A batch that does not fit the device's memory is run in halves, and the block's notes say so. A
forward that only observes ends at the last of the observed linears.

Legend: B sequences in a batch, S tokens, H hidden size, K input channels.
"""

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from qtool.calibration import kept_outputs
from qtool.calibration.batch import HIDDEN, Batch, to_device
from qtool.calibration.block import Block
from qtool.calibration.timing import phase
from qtool.errors import Interrupted, QtoolError
from qtool.models.architecture import dtype_name
from qtool.models.auto import running
from qtool.models.experts import SeparateExperts, expert_place
from qtool.models.passed import as_arguments, handed_on

#: most tokens of a sequence whose attention is differentiated as plain products
PLAIN_ATTENTION = 2048
#: gets the input ``[tokens, K]`` of a linear; for a linear of all experts also the token counts
Observer = Callable[..., None]


def entering(block: Block, batch: Batch) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors that enter the block, by name, and its other arguments, on its device.

    The arguments are None if the model passes the block over.
    """
    tensors = {n: t.to(block.device, non_blocking=True) for n, t in batch.tensors.items()}
    return tensors, to_device(batch.kwargs[block.index], block.device)


def leaving(
    block: Block, tensors: Mapping[str, Tensor], arguments: dict[str, Any] | None, **extra: Any
) -> dict[str, Tensor]:
    """All tensors that the block passes on for what :func:`entering` returns, with gradients."""
    if arguments is None:
        return dict(tensors)
    passes = block.family.passes
    given = as_arguments({n: t for n, t in tensors.items() if n != HIDDEN}, passes)
    block.update_module()
    try:
        out = block.module(tensors[HIDDEN], **(arguments | given | extra))
    except Exception as error:
        if _is_of_qtool(error):
            raise
        with running():
            raise
    returned = tuple(out) if isinstance(out, (tuple, list)) else (out,)
    return {HIDDEN: returned[0], **handed_on(returned, given, passes)}


def with_gradients(block: Block, batch: Batch) -> tuple[Tensor, Tensor]:
    """The block's input and output ``[B, S, H]``, with the graph between them for autograd.

    Keys and values are in full precision. Up to :data:`PLAIN_ATTENTION` tokens attention runs as
    plain products, whose gradients are the same in each run; those of fused kernels are not.
    """
    x = batch.hidden.to(block.device).detach().requires_grad_()
    plain = plain_attention() if batch.shape[1] <= PLAIN_ATTENTION else nullcontext()
    with torch.enable_grad(), plain:
        # a copy, since some blocks add to their input in place
        return x, _forward(block, replace(batch, hidden=x.clone()), **block.full_kv)[HIDDEN]


@contextmanager
def plain_attention() -> Iterator[None]:
    """While open, attention is plain products in the dtype of its inputs, not in float32."""
    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@contextmanager
def keeping_outputs(block: Block, names: Iterable[str]) -> Iterator[dict[str, Tensor]]:
    """While open, put the outputs of submodules ``names`` into the dictionary that it yields."""
    outputs: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[..., None]:
        return lambda module, inputs, output: outputs.update({name: output})

    with ExitStack() as opened:
        for name in names:
            opened.callback(block.get(name).register_forward_hook(keeper(name)).remove)
        yield outputs


def run(block: Block, batch: Batch, **extra: Any) -> Tensor:
    """The block's output ``[B, S, H]`` for one batch; ``extra`` arguments reach the block.

    Raises:
        Interrupted: a single sequence does not fit.
    """
    return hand_on(block, batch, **extra)[HIDDEN]


def hand_on(
    block: Block, batch: Batch, observers: Mapping[str, Observer] | None = None, **extra: Any
) -> dict[str, Tensor]:
    """All tensors that the block passes on (:mod:`qtool.models.passed`), by name; as :func:`run`.

    ``observers`` are as in :func:`observe`.
    """
    return _observe(block, batch, observers or {}, to_end=True, **extra)


def observe(
    block: Block, batches: Sequence[Batch], observers: Mapping[str, Observer], **extra: Any
) -> None:
    """Run all batches; each observer gets its submodule's input ``[tokens, K]``, batch by batch.

    A name with ``*`` for an expert's number means this linear of all experts: its observer gets the
    inputs of all experts, sorted by expert, and their counts.
    """
    for batch in batches:
        _observe(block, batch, observers, **extra)


def by_place(block: Block, names: Iterable[str]) -> dict[str, dict[int, str]]:
    """``names`` as :func:`observe` takes them: experts' linears by number, under a name with ``*``.

    Any other linear is alone under its own name, and so is an expert's that permutes its input.
    """
    places: dict[str, dict[int, str]] = {}
    for name in names:
        place = None if name in block.permutations else expert_place(block.module, name)
        key, number = place or (name, 0)
        places.setdefault(key, {})[number] = name
    return places


def inputs_of(block: Block, batch: Batch, *names: str, **extra: Any) -> list[Tensor]:
    """The inputs ``[tokens, K]`` of each name for one batch; empty if one was not called."""
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    observe(block, [batch], {name: parts.append for name, parts in seen.items()}, **extra)
    return joined(seen, names)


def joined(seen: Mapping[str, list[Tensor]], names: Sequence[str]) -> list[Tensor]:
    """The inputs of ``names``, joined from parts of a batch."""
    if not all(seen.values()):
        return []
    return [torch.cat(seen[name]) if len(seen[name]) > 1 else seen[name][0] for name in names]


def propagate(block: Block, batches: Sequence[Batch]) -> None:
    """Replace the block's inputs by its outputs, in all batches, in place.

    Raises:
        QtoolError: the outputs have NaN or Inf, which would spread to all later blocks.
    """
    require_finite(block, [move_on(block, batch) for batch in batches])


def move_on(
    block: Block, batch: Batch, observers: Mapping[str, Observer] | None = None, **extra: Any
) -> tuple[Tensor, torch.dtype]:
    """:func:`propagate` for one batch: whether its output is finite, and the output's dtype."""
    out = hand_on(block, batch, observers, **extra)
    batch.keep(out)
    return torch.isfinite(out[HIDDEN]).all(), out[HIDDEN].dtype


def require_finite(block: Block, moved: Sequence[tuple[Tensor, torch.dtype]]) -> None:
    """Refuse NaN and Inf in the results of :func:`move_on`; this waits for a GPU once."""
    if moved and not torch.stack([finite for finite, _ in moved]).all():
        dtype = dtype_name(moved[0][1])
        hint = "; it overflows in this model, convert it to bfloat16 first" * (dtype == "float16")
        raise QtoolError(
            f"block {block.index}: NaN or Inf in its output on the calibration text, "
            f"in {dtype}{hint}"
        )


class AllSeen(Exception):
    """Ends a forward once all observers have seen their input."""


def _forward(block: Block, batch: Batch, **extra: Any) -> dict[str, Tensor]:
    """All tensors that the block passes on, for all sequences at once, with gradients."""
    return leaving(block, *entering(block, batch), **extra)


def _is_of_qtool(error: Exception) -> bool:
    """Whether ``error`` passed through qtool's code after a module of the model was called.

    Then an observer, a method or a scheme raised it. A call of the attention by
    :mod:`.kept_outputs` does not count.
    """
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    next(frames)  # the function that called the module
    names = {frame.f_globals.get("__name__", "") for frame in frames} - {kept_outputs.__name__}
    return any(name.startswith("qtool.") for name in names)


def _forward_if_it_fits(block: Block, batch: Batch, **extra: Any) -> dict[str, Tensor] | None:
    """:func:`hand_on` for all sequences at once; None if they do not fit, but fewer may."""
    try:
        with phase("forward"):
            return _forward(block, batch, **extra)
    except torch.OutOfMemoryError:
        sequences, tokens = batch.shape
        if sequences == 1:
            raise Interrupted(
                f"block {block.index}: one sequence of {tokens} tokens does not fit the memory of "
                f"{block.device}; "
                "use a shorter --seqlen"
            ) from None
    halved = "batches halved for lack of memory"
    block.notes[halved] = block.notes.get(halved, 0) + 1
    torch.cuda.empty_cache()
    return None


@torch.no_grad()
def _observe(
    block: Block,
    batch: Batch,
    observers: Mapping[str, Observer],
    *,
    to_end: bool = False,
    **extra: Any,
) -> dict[str, Tensor]:
    """The tensors that the block passes on if it is run ``to_end``."""
    seen: set[str] = set()
    kept = block.kept_outputs

    def see(name: str, *inputs: Any) -> None:
        observers[name](*inputs)
        seen.add(name)
        end_if_seen()

    def end_if_seen(*_: Any) -> None:
        if len(seen) == len(observers) and not to_end and not (kept and kept.filling):
            raise AllSeen

    out: dict[str, Tensor] | None = {}
    with ExitStack() as opened, suppress(AllSeen):
        opened.enter_context(_watched(block, batch, {n: partial(see, n) for n in observers}))
        if kept:
            module = block.get(kept.name)
            opened.enter_context(kept.instead(module, batch, observers, to_end=to_end))
            opened.callback(module.register_forward_hook(end_if_seen).remove)
        out = _forward_if_it_fits(block, batch, **extra)
    if out is not None:
        return out
    # inputs that were observed before the memory ran out are not observed again
    left = {name: observer for name, observer in observers.items() if name not in seen}
    parts = [_observe(block, half, left, to_end=to_end, **extra) for half in batch.halves()]
    return batch.joined(parts) if to_end else {}


@contextmanager
def _watched(block: Block, batch: Batch, observers: Mapping[str, Observer]) -> Iterator[None]:
    """Give the inputs of a forward of ``batch`` to ``observers`` while open."""

    def hook(observer: Observer) -> Callable[..., None]:
        return lambda _, inputs: observer(inputs[0].reshape(-1, inputs[0].shape[-1]))

    with ExitStack() as opened:
        for name, observer in observers.items():
            if "*" in name:
                stack, _, linear = name.partition(".*.")
                experts = cast(SeparateExperts, block.get(stack))
                experts.observers[linear] = observer
                opened.callback(experts.observers.pop, linear)
            else:
                handle = block.get(name).register_forward_pre_hook(hook(observer))
                opened.callback(handle.remove)
        if batch.added_tokens is not None and observers:
            for module in block.module.modules():
                if isinstance(module, SeparateExperts):
                    module.added_tokens = batch.added_tokens.flatten(0, 1)
                    opened.callback(setattr, module, "added_tokens", None)
        yield
