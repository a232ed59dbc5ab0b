"""Decoding by CUDA graphs: a step of one token per sequence is recorded once, then replayed.

A step of an 8B model is a thousand small launches, each of which takes the host longer than the
GPU. :func:`graph_decoding` gives a model two methods. Its ``generate`` uses transformers' static
cache, whose tensors keep their addresses, unless a call says otherwise. Its ``forward`` records its
second step over such a cache and replays it from then on. Nothing is compiled, and a replay
launches what the model itself launches. Other forwards (prompts, other caches, gradients) are the
model's own.

Attention of one token reads a range of each sequence's tokens (:mod:`.range_attention`).

Legend: B batch, H kv heads, C capacity of the cache, D head dimension.
"""

import functools
import inspect
import math
import warnings
from functools import partial, wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from transformers import PreTrainedModel
from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer
from transformers.masking_utils import create_masks_for_generate

from qtool.errors import in_one_line
from qtool.kernels.dtypes import HALF
from qtool.kernels.recording import recording
from qtool.models import family_of
from qtool.models.cache_argument import CACHE, OLDER, with_cache_renamed
from qtool.models.parts import Heads
from qtool.runtime.kv_cache import quantized_decoder
from qtool.runtime.merge import norms_taken_along
from qtool.runtime.range_attention import (
    RANGE_ATTENTION,
    are_ranges,
    last_of,
    mask_of,
    ranges_of,
)

#: arguments of a forward that are tensors and change from step to step
INPUTS = ("input_ids", "position_ids", "attention_mask")
#: arguments with which ``generate`` needs another cache, or is given one
OWN_CACHE = (
    "cache_implementation",
    OLDER,
    CACHE,
    "assistant_model",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
)
#: kinds of layers whose queries see a range of tokens
RANGED = {"full_attention", "sliding_attention"}


class StaticTokens(StaticLayer):
    """A layer of a static cache with memory ``[B, C, H, D]``, as attention over ranges reads it.

    Other code sees tensors ``[B, H, C, D]``, as in any layer. It keeps all tokens, also those
    before its sliding ``window``, which the mask hides.
    """

    def __init__(self, max_cache_len: int, window: int | None) -> None:
        super().__init__(max_cache_len)
        self.window = window if window and window < max_cache_len else None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.keys, self.values = _tokens_first(self.keys), _tokens_first(self.values)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None or key_states.shape[2] > 1:
            return super().update(key_states, value_states, *args, **kwargs)
        position = self.cumulative_length.view(1)
        self.keys.index_copy_(2, position, key_states)
        self.values.index_copy_(2, position, value_states)
        self.cumulative_length.add_(1)
        return self.keys, self.values


def _tokens_first(x: Any) -> Tensor:
    """``x [B, H, C, D]``, with C before H in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def keep_tokens(cache: StaticCache, window: int | None) -> None:
    """Make all layers of an empty cache :class:`StaticTokens`, if all of them can be.

    If all layers have a sliding ``window``, transformers cuts their lengths to it, so the length
    that was asked for is known only if it is below the window.
    """
    layers: Any = cache.layers
    lengths = [layer.max_cache_len for layer in layers]
    windows = [layer.max_cache_len if layer.is_sliding else None for layer in layers]
    known = None in windows or max(lengths) < (window or 0)
    if known and {type(layer) for layer in layers} <= {StaticLayer, StaticSlidingWindowLayer}:
        cache.layers = [StaticTokens(max(lengths), window) for window in windows]


def graph_cache(model: PreTrainedModel, length: int) -> StaticCache | None:
    """A cache of ``length`` tokens over which ``model`` decodes by graphs; None if it does not."""
    if not hasattr(model, "decode_graphs"):
        return None
    config = model.config.get_text_config(decoder=True)
    cache = StaticCache(config=config, max_cache_len=length)
    keep_tokens(cache, getattr(config, "sliding_window", None))
    return cache if all(type(layer) is StaticTokens for layer in cache.layers) else None


def can_decode_by_graphs(model: PreTrainedModel) -> bool:
    """Whether the architecture of ``model``, as it is loaded, decodes by graphs.

    It does not if the work of a step depends on data (experts that are not grouped), if attention
    is not a plain softmax, or if the KV cache is quantized.
    """
    config, decoder = model.config.get_text_config(decoder=True), model.get_decoder()
    taken = inspect.signature(type(model).forward).parameters.values()
    return (
        _are_grouped(model)
        and getattr(model, "_can_compile_fullgraph", False)
        and getattr(decoder, "_supports_attention_backend", False)
        and decoder.config._attn_implementation == "sdpa"
        and quantized_decoder(model) is None
        and set(getattr(config, "layer_types", None) or ()) <= RANGED
        and not getattr(config, "attn_logit_softcapping", None)
        and not getattr(config, "num_kv_shared_layers", None)
        and not getattr(config, "attention_chunk_size", None)
        and any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken)
        and not getattr(config, "is_heterogeneous", False)  # sizes of its own for each layer
        and Heads.of(config).dim % 8 == 0
        and Heads.of(config).dim <= 256
        and model.dtype in HALF
        and hasattr(StaticLayer(1), "cumulative_length")  # a length on the device
    )


def graph_decoding(model: PreTrainedModel) -> bool:
    """Let ``model`` on a CUDA device decode by graphs; False if it cannot."""
    if not can_decode_by_graphs(model):
        return False
    config, decoder = model.config.get_text_config(decoder=True), model.get_decoder()
    own, window = type(model).forward, getattr(config, "sliding_window", None)
    decoder.config._attn_implementation = RANGE_ATTENTION
    model.decode_graphs = DecodeGraphs()  # type: ignore[assignment]
    masks = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    model.create_masks_for_generate = partial(_step_mask, masks, window)  # type: ignore[assignment]

    @wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = with_cache_renamed(kwargs)
        cache: Any = kwargs.get(CACHE)
        if type(cache) is StaticCache and not torch.compiler.is_compiling():
            if not cache.is_initialized:
                keep_tokens(cache, window)
            if not args:
                return self.decode_graphs(MethodType(own, self), cache, kwargs)
        return own(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # asked each step
    generate: Any = type(model).generate  # type: ignore[attr-defined]

    @wraps(generate)
    def generate_statically(
        self: Any, inputs: Any = None, generation_config: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        settings = generation_config or self.generation_config

        def chosen(name: str) -> Any:
            return kwargs.get(name, getattr(settings, name, None))

        if all(chosen(name) is None for name in OWN_CACHE) and chosen("use_cache") is not False:
            kwargs["cache_implementation"] = "static"
        return generate(self, inputs, generation_config, *args, **kwargs)

    model.forward = MethodType(forward, model)
    model.generate = MethodType(generate_statically, model)  # type: ignore[assignment]
    return True


def _are_grouped(model: PreTrainedModel) -> bool:
    """Whether all experts of a mixture are computed at once; True for other models."""
    if family_of(model.config).experts is None:
        return True
    stacks = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    return bool(stacks) and all(getattr(stack, "grouped", None) for stack in stacks)


def _step_mask(masks: Any, window: int | None, **kwargs: Any) -> Any:
    """The masks of transformers' function ``masks``; a step's in two launches instead of twenty.

    The one query of a step is the last token: it sees all that the padding mask ``[B, T]`` shows.
    """
    padding, cache = kwargs.get("attention_mask"), kwargs.get(CACHE)
    if type(cache) is StaticCache and not cache.is_initialized:
        keep_tokens(cache, window)
    layers = getattr(cache, "layers", None)
    if (
        kwargs["inputs_embeds"].shape[1] > 1
        or not layers
        or any(type(layer) is not StaticTokens or layer.window for layer in layers)
        or not isinstance(padding, Tensor)
        or any(kwargs.get(name) is not None for name in ("block_sequence_ids", "token_type_ids"))
    ):
        return masks(**kwargs)
    room = layers[0].max_cache_len - padding.shape[1]
    return nn.functional.pad(padding, (0, room)).bool()[:, None, None]


class DecodeGraphs:
    """The recorded steps of one model, by cache; unused once a step could not be recorded."""

    def __init__(self) -> None:
        self.steps: WeakKeyDictionary[StaticCache, Step] = WeakKeyDictionary()
        self.refused = False

    def __deepcopy__(self, memo: dict[int, Any]) -> "DecodeGraphs":
        return DecodeGraphs()

    def __call__(self, forward: Any, cache: Any, given: dict[str, Any]) -> Any:
        """``forward(**given)``, by a recorded graph if possible."""
        kwargs, masks = given, given.get("attention_mask")
        if isinstance(masks, dict) and "full_attention" in masks:  # by kind of layer
            kwargs = given | {"attention_mask": masks["full_attention"]}
        if self.refused or not _is_step(cache, kwargs):
            return forward(**given)
        with torch.cuda.device(kwargs["input_ids"].device):  # a graph is of the current one
            return self._step(forward, cache, kwargs, given)

    def _step(self, forward: Any, cache: Any, kwargs: dict[str, Any], given: dict[str, Any]) -> Any:
        """The output of a step, by its graph from the second on.

        ``kwargs`` are the arguments ``given``, except that they have only the mask of full
        attention, from which :meth:`Step.run` computes those of sliding windows.
        """
        step = self.steps.get(cache)
        if step is None or not step.is_of(cache, kwargs):
            if not are_ranges(kwargs["attention_mask"]).all():
                return forward(**given)
            step = self.steps[cache] = Step(cache, kwargs)
            return step.run(forward, cache)
        if step.graph is None:
            try:
                step.record(forward, cache)
            except RuntimeError as error:  # nothing was computed while it was recorded
                self.refused = True
                warnings.warn(f"decoding without CUDA graphs: {in_one_line(error)}", stacklevel=2)
                return forward(**given)
        return step.replay(cache, kwargs)


class Step:
    """A step of one token per sequence over one cache: its inputs, and its graph if recorded."""

    def __init__(self, cache: Any, kwargs: dict[str, Any]) -> None:
        self.inputs = {name: tensor.clone() for name, tensor in _inputs(kwargs).items()}
        self.settings = _settings(kwargs)
        self.keys = cache.layers[0].keys
        self.graph: torch.cuda.CUDAGraph | None = None

    def is_of(self, cache: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a call differs from this step only in the values of its inputs."""
        return (
            cache.layers[0].keys is self.keys
            and _settings(kwargs) == self.settings
            and {name: tensor.shape for name, tensor in _inputs(kwargs).items()}
            == {name: tensor.shape for name, tensor in self.inputs.items()}
        )

    def run(self, forward: Any, cache: StaticCache) -> Any:
        """The forward of :attr:`inputs`; logits are NaN for a sequence whose mask has holes."""
        mask, settings = self.inputs["attention_mask"], dict(self.settings)
        ranges = ranges_of(mask)
        layers: Any = cache.layers
        windows = {layer.window: last_of(ranges, layer.window) for layer in layers}
        settings["key_ranges"] = [windows[layer.window] for layer in layers]
        inputs: dict[str, Any] = self.inputs
        for window in windows.keys() - {None}:
            sliding = mask_of(windows[window], mask.shape[-1])
            kinds = {"full_attention": mask, "sliding_attention": sliding}
            inputs = inputs | {"attention_mask": kinds}
        with norms_taken_along():
            out = forward(**inputs, **settings, **{CACHE: cache})
        holes = ~are_ranges(mask)[:, None, None]
        out.logits = out.logits.masked_fill(holes, math.nan)
        return out

    def record(self, forward: Any, cache: StaticCache) -> None:
        """Record :meth:`run`, which must have run before, so that all kernels are loaded."""
        self.graph = torch.cuda.CUDAGraph()
        with recording(self.graph, _recording_stream(self.keys.device)):
            out = self.run(forward, cache)
        self.output, self.logits = type(out), out.logits  # no reference to the cache

    def replay(self, cache: StaticCache, kwargs: dict[str, Any]) -> Any:
        """The output for the inputs in ``kwargs``; its logits are a copy for the caller."""
        assert self.graph is not None
        for name, tensor in self.inputs.items():
            tensor.copy_(kwargs[name])
        self.graph.replay()
        return self.output(logits=self.logits.clone(), **{CACHE: cache})


@functools.cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps on ``device`` are recorded on; torch's own belongs to one device."""
    return torch.cuda.Stream(device)


def _is_step(cache: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a graph may hold a forward: one token per sequence, a mask, no other request."""
    ids, mask = kwargs.get("input_ids"), kwargs.get("attention_mask")
    return (
        cache.is_initialized
        and type(cache.layers[0]) is StaticTokens
        and isinstance(ids, Tensor)
        and _has_graphs(ids.device)
        and ids.shape[1] == 1
        and isinstance(mask, Tensor)
        and mask.dtype == torch.bool
        and mask.shape == (len(ids), 1, 1, cache.layers[0].max_cache_len)
        and not any(isinstance(kwargs[name], Tensor) for name in kwargs if name not in INPUTS)
        and not kwargs.get("output_attentions")
        and not kwargs.get("output_hidden_states")
        and kwargs.get("return_dict") is not False
        and not torch.is_grad_enabled()
        and not is_in_torch_dispatch_mode()
    )


def _has_graphs(device: torch.device) -> bool:
    """Whether a graph may be recorded on ``device`` now, so not during another recording."""
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _inputs(kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """Those of :data:`INPUTS` that a forward is given."""
    return {name: kwargs[name] for name in INPUTS if kwargs.get(name) is not None}


def _settings(kwargs: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The arguments of a forward that are neither :data:`INPUTS` nor the cache."""
    return tuple((name, value) for name, value in kwargs.items() if name not in (*INPUTS, CACHE))
