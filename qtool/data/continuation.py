"""Calibration windows that the model continues itself, after a few tokens of a text.

A given text rarely has the distribution of a model's training data, so Hessians, scales and
clipping fitted to it are fitted to inputs that are rarer than they seem. The model's own
continuations, sampled at temperature 1, have the distribution that the model has learned (Williams
et al., "Self-calibration for language model quantization and pruning", 2025; LLM-QAT does so for
training).
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache

from qtool.errors import QtoolError
from qtool.io.finite import require_all_finite
from qtool.models.auto import running
from qtool.models.cache_argument import CACHE
from qtool.runtime.decode import StaticTokens, graph_cache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: attention backends without cuDNN's, which makes a plan for each length of a cache: that takes 60
#: ms a token on an H200, and the plan is not the same each time
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
#: what to do about a model that cannot run with a cache
ADVICE = ", so it cannot continue calibration windows: pass --windows given to take all of the text"


class Journal(Protocol):
    """Keeps the sampled tokens, so that a killed run continues from them."""

    def read(self) -> Iterable[Mapping[str, Tensor]]:
        """The entries so far, in their order; none is appended before the last one was read."""

    def due(self) -> bool:
        """Whether it is time for the next entry."""

    def append(self, entry: Mapping[str, Tensor]) -> None:
        """Add an entry."""


@torch.no_grad()
def continued(
    model: "PreTrainedModel",
    prompts: Tensor,
    length: int,
    *,
    seed: int,
    batch_size: int | None = None,
    journal: Journal | None = None,
) -> Tensor:
    """Windows ``[B, length]`` on the CPU: ``prompts [B, S]`` and the model's samples after them.

    No window ends early: after a token that ends a document, the model samples the next token as
    always.

    Args:
        batch_size: number of windows continued at once, by default all; the samples depend on it.
        journal: journal of the same windows; tokens of its entries are not sampled again. The
            samples do not depend on the journal, since it keeps keys and values to the bit.

    Raises:
        QtoolError: NaN or Inf in the model's logits, or the model cannot be run.
    """
    random, windows = torch.Generator(model.device).manual_seed(seed), []
    entries = iter(() if journal is None else journal.read())
    for chunk in prompts.split(batch_size or len(prompts)):
        batch = _Batch(model, chunk, length)
        while not batch.is_whole and (entry := next(entries, None)):
            batch.restore(entry, random)
        while not batch.is_whole:
            batch.draw(random)
            if journal is None:
                continue
            if batch.is_whole or (batch.can_be_kept and journal.due()):
                journal.append(batch.entry(random))
        batch.require_finite()
        windows.append(batch.windows.cpu())
    return torch.cat(windows)


class _Batch:
    """Windows that are continued at once, with CUDA graphs if the model can decode with them.

    Attributes:
        state: name of the model's argument for its state of earlier tokens; empty if each forward
            reads all tokens, since the model has no such state, or one that also holds tokens of
            its own (CPM-Ant's prompt).
        drawn: number of tokens of each window so far.
        kept: number of tokens of each window in the journal.
        cached: number of tokens of which the journal has keys and values.
    """

    def __init__(self, model: "PreTrainedModel", prompts: Tensor, length: int) -> None:
        known = inspect.signature(model.forward).parameters
        self.model, self.length = model, length
        self.state = next((name for name in (CACHE, "cache_params") if name in known), "")
        with running(ADVICE):
            self.cache: Any = _cache(model, length) if self.state == CACHE else None
        layers = self.cache.layers if self.cache is not None else []
        self.layers = [x for x in layers if isinstance(x, (_Preallocated, StaticTokens))]
        self.tokens = [prompts.to(model.device)]
        self.drawn = self.kept = prompts.shape[1]
        self.cached = 0
        self.finite = torch.ones((), dtype=torch.bool, device=model.device)

    @property
    def windows(self) -> Tensor:
        return torch.cat(self.tokens, 1)

    @property
    def is_whole(self) -> bool:
        """Whether the windows have all their tokens."""
        return self.drawn == self.length

    @property
    def can_be_kept(self) -> bool:
        """Whether the cache consists of the keys and values of all tokens, and nothing else."""
        plain = isinstance(self.cache, (DynamicCache, StaticCache))
        return plain and 0 < len(self.layers) == len(self.cache.layers)

    def inputs(self) -> dict[str, Any]:
        """The forward's arguments: the new tokens, and the state of the earlier ones."""
        if not self.state:
            return {"input_ids": self.windows}
        given = self.tokens[-1]
        if not isinstance(self.cache, StaticCache):
            return {"input_ids": given, self.state: self.cache}
        return self.model.prepare_inputs_for_generation(  # type: ignore[operator]
            given,
            attention_mask=given.new_ones(len(given), self.drawn),
            position_ids=torch.arange(self.drawn, device=given.device).expand(len(given), -1),
            **{CACHE: self.cache},
        )

    def draw(self, random: torch.Generator) -> None:
        """Sample the next token of each window."""
        with sdpa_kernel(ATTENTION), running(ADVICE):
            # a model may put any argument among those that it prepares
            out = self.model(**self.inputs() | {"use_cache": bool(self.state), "logits_to_keep": 1})
        self.cache = getattr(out, self.state, None) if self.state else None
        more = [
            x.get_seq_length() > self.drawn for x in self.layers if isinstance(x, _Preallocated)
        ]
        if self.cache is None or any(more):
            self.state, self.cache, self.layers = "", None, []
        logits = out.logits[:, -1].float()
        self.finite &= torch.isfinite(logits).all()  # read later, so that nothing waits for a GPU
        self.tokens.append(sampled(logits.nan_to_num(0, 0, 0).softmax(-1), random))
        self.drawn += 1

    def entry(self, random: torch.Generator) -> dict[str, Tensor]:
        """The tokens, keys and values since the last entry, and the generator's state.

        Nothing reads the keys and values of whole windows, so these have none. A layer that text
        alone passes over (Mllama's cross-attention) has none either.
        """
        self.require_finite()
        found = {"tokens": self.windows[:, self.kept :], "random": random.get_state()}
        for number, layer in enumerate([] if self.is_whole else self.layers):
            for name, filled in (("keys", layer.keys), ("values", layer.values)):
                if filled is not None:
                    found[f"{name}.{number}"] = filled[:, :, self.cached : self.drawn - 1]
        self._all_is_kept()
        return {name: tensor.cpu().contiguous() for name, tensor in found.items()}

    def restore(self, entry: Mapping[str, Tensor], random: torch.Generator) -> None:
        """Restore the state from an entry of :meth:`entry`."""
        device = self.model.device
        random.set_state(entry["random"])
        self.tokens += entry["tokens"].to(device).split(1, 1)
        self.drawn += entry["tokens"].shape[1]
        for number, layer in enumerate([] if self.is_whole else self.layers):
            if (keys := entry.get(f"keys.{number}")) is not None:
                layer.update(keys.to(device), entry[f"values.{number}"].to(device))
        self._all_is_kept()

    def _all_is_kept(self) -> None:
        self.kept, self.cached = self.drawn, self.drawn - 1  # no forward has read the last token

    def require_finite(self) -> None:
        if not self.finite:
            require_all_finite(dict(self.model.named_parameters()))
            raise QtoolError(
                "NaN or Inf in the model's logits, though its weights are finite in "
                f"{self.model.dtype}: it cannot continue the calibration text"
            )


def sampled(probabilities: Tensor, random: torch.Generator) -> Tensor:
    """A token ``[B, 1]`` for each row of ``probabilities [B, V]``.

    The cumulative distribution is inverted at one random number for each row.
    ``torch.multinomial`` draws a number for each of V tokens.
    """
    upto = probabilities.cumsum(-1, dtype=torch.float64)
    share = torch.rand(len(upto), 1, dtype=upto.dtype, device=upto.device, generator=random)
    return torch.searchsorted(upto, share * upto[:, -1:], right=True)


def _cache(model: "PreTrainedModel", length: int) -> Cache | None:
    """The model's cache with room for ``length`` tokens.

    Without such room some layers copy their whole content for each token. The cache is None if
    layers keep other things than keys and values; the model then makes its own.
    """
    if getattr(model, "_is_stateful", False):
        return None
    if (static := graph_cache(model, length)) is not None:
        return static
    cache = DynamicCache(config=model.config)
    if not all(isinstance(layer, DynamicLayer) for layer in cache.layers):
        return None
    cache.layers = [
        _Preallocated(length) if type(layer) is DynamicLayer else layer for layer in cache.layers
    ]
    return cache


class _Preallocated(DynamicLayer):
    """A layer whose keys and values are the filled part of memory for ``length`` tokens."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        filled = self.get_seq_length()
        if not filled:
            self.lazy_initialization(key_states, value_states)
            self.room = [
                t.new_empty(*t.shape[:2], max(self.length, t.shape[2]), t.shape[3])
                for t in (key_states, value_states)
            ]
        now = filled + key_states.shape[2]
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, filled:now] = new
        self.keys, self.values = (room[:, :, :now] for room in self.room)
        return self.keys, self.values
