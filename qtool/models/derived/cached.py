"""What blocks put into their KV cache, seen in a forward with a cache that stores nothing.

How a block makes its keys and values does not matter, nor what it does with their weighted sums: a
quantized cache changes only what it is given.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
)

from qtool.models.cache_argument import BLOCK_ARGUMENTS, CACHE
from qtool.models.derived.forward import few_ids, on_random_numbers
from qtool.models.derived.recorded import SHAPE, Recorded
from qtool.models.experts import is_experts
from qtool.models.parts import KVCache
from qtool.models.skeleton import replaced_forwards
from qtool.schemes.kv import KV_QUANTIZERS

#: what transformers has in a cache for a block whose keys and values can be replaced
LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionAndFullAttentionLayer,
)


class Given(NamedTuple):
    """Keys and values that ``module`` gave to its cache: their shapes ``[B, H, S, D]``."""

    module: str
    keys: torch.Size
    values: torch.Size


class _Notes(DynamicCache):
    """A cache that notes what it is given, and by which of ``modules``, and gives it back."""

    def __init__(self, config: Any, modules: Mapping[nn.Module, str]) -> None:
        super().__init__(config=config)
        self.modules, self.running = modules, [""]
        self.given: dict[int, list[Given]] = {}

    def enter(self, module: nn.Module, _: Any) -> None:
        """A forward hook of :attr:`modules`: ``module`` begins."""
        self.running.append(self.modules[module])

    def leave(self, *_: Any) -> None:
        """A forward hook of :attr:`modules`: the last one that began ends."""
        self.running.pop()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        given = Given(self.running[-1], key_states.shape, value_states.shape)
        self.given.setdefault(layer_idx, []).append(given)
        return key_states, value_states


class KVCaches:
    """The KV caches of the blocks of a recorded model."""

    def __init__(self, recorded: Recorded) -> None:
        self.recorded, model = recorded, recorded.text_model
        names = {module: name for name, module in recorded.model.named_modules()}
        self.notes = _Notes(recorded.config, names)
        #: why the cache of no block is known
        self.unknown = ""
        if not any(isinstance(layer, CacheLayerMixin) for layer in self.notes.layers):
            return  # states alone, which some models cannot run with
        try:
            with _noted(self.notes):
                model(input_ids=few_ids(model), use_cache=True, **{CACHE: self.notes})
        except Exception:  # whatever a model's own code raises
            self.unknown = "its forward takes no KV cache of transformers' common kind"
        for number, calls in self.notes.given.items():
            if not all(f"{call.module}.".startswith(self._prefix(number)) for call in calls):
                self.unknown = "it counts its layers otherwise than its blocks"

    def of(self, number: int) -> KVCache | str | None:
        """The cache of the blocks like ``number``, or why it cannot be replaced.

        It is None if they keep no keys and values.
        """
        like = [n for n, first in enumerate(self.recorded.like) if first == number]
        found = {self.unknown or self._of(n) for n in like}
        return found.pop() if len(found) == 1 else "blocks that are alike use it differently"

    def _of(self, number: int) -> KVCache | str | None:
        calls = self.notes.given.get(number, [])
        if not calls:
            return None
        module, keys, values = calls[0]
        name = f"{module}.".removeprefix(self._prefix(number))[:-1]
        if getattr(self.recorded.config, "kv_lora_rank", None):
            return "engines cache the latent of its attention, not keys and values"
        if len(calls) > 1:
            return "a block gives it keys and values more than once"
        if type(self.notes.layers[number]) not in LAYERS:
            return "its blocks keep more than keys and values in the cache"
        if keys != values or (keys[0], keys[2]) != SHAPE:
            return (
                f"it is given keys {list(keys)} and values {list(values)}, where both should be"
                f" [{SHAPE[0]}, heads, {SHAPE[1]}, head size]"
            )
        owner = self.recorded.model.get_submodule(module)
        for attribute in (name for kv in KV_QUANTIZERS.values() for name in kv.constants):
            if hasattr(owner, attribute):  # a tensor of a quantized cache would take its place
                return f"its {name or 'block'} has a {attribute} of another meaning"
        argument = _argument(self.recorded.model.get_submodule(self._prefix(number)[:-1]))
        if not argument:
            return "its blocks have no argument for it"
        return KVCache(name, argument, (keys[1], keys[3]))

    def _prefix(self, number: int) -> str:
        return f"{self.recorded.blocks}.{number}."


@contextmanager
def _noted(notes: _Notes) -> Iterator[None]:
    """While open, a model runs, without its stacked experts, and ``notes`` knows what runs."""
    unchanged = {m: lambda hidden, *_, **__: hidden for m in notes.modules if is_experts(m)}
    with ExitStack() as opened:
        # not torch's hooks for all modules: another thread may be running a model of its own
        for module in notes.modules:
            opened.enter_context(module.register_forward_pre_hook(notes.enter))
            opened.enter_context(module.register_forward_hook(notes.leave))
        with replaced_forwards(unchanged), on_random_numbers(notes.modules):
            yield


def _argument(block: nn.Module) -> str:
    """The block's argument for the cache; empty if it has none."""
    known = inspect.signature(type(block).forward).parameters
    others = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    return next((name for name in BLOCK_ARGUMENTS if name in known), CACHE if others else "")
