"""SmoothAttention: keys are made easy to quantize for a 4-bit cache, queries take the inverse.

QServe section 3.2. With post-RoPE keys K [Hkv, D], for the channels i and j that RoPE rotates as a
pair (j = i + D/2 in Llama-like models, i + 1 in GLM-4 and Cohere):

    lambda_i = lambda_j = max(max|K_i|, max|K_j|)^alpha    W_q <- Lambda W_q,  W_k <- Lambda^-1 W_k

and the same for the biases. Each kv head has one lambda, which its query heads share. If norms
follow the projections (Qwen3), the factor goes into the norms' weights, with one lambda for all
heads; such norms take it in attention of any form (Qwen 3.5, Gemma 4).

The paper's alpha = 0.5 serves most models. Besides, a factor and a phase of every pair are fitted
to the keys' range and the queries' power (:mod:`qtool.calibration.transforms.key_transform`), from
several starts; each head takes the result with the least error of the scores. The candidate with
the least block-output error under 4-bit keys wins; unchanged keys are always a candidate.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtool.calibration.batch import Batch
from qtool.calibration.block import Block
from qtool.calibration.cost import BlockShape, Work
from qtool.calibration.forwards import run
from qtool.calibration.method import Transform
from qtool.calibration.statistics import batch_shapes, count_tokens, maximum, subset
from qtool.calibration.transforms.key_transform import KeyTransform, fit, key_factor
from qtool.calibration.transforms.queries import (
    Queries,
    pair_order,
    queries_of,
    query_and_key_norm,
    rotary_dim,
    shared_norm,
)
from qtool.distributed import ranks
from qtool.models import Family
from qtool.schemes.kv import KV4


class KeyObserver:
    """Collects keys after RoPE, in place of a KV cache.

    Attributes:
        amax: the largest magnitude of each channel so far, ``[Hkv, D]``.
        total: the sum of each channel so far, ``[Hkv, D]``.
        tokens: number of tokens in ``total``; if a batch was halved while it ran, some count twice.
        kept: a random ``share`` of the tokens of each update, at least one, ``[Hkv, T, D]``.
    """

    def __init__(self, share: float = 0.0, seed: int = 0) -> None:
        self.share, self.random = share, torch.Generator().manual_seed(seed)
        self.amax: Tensor | None = None
        self.total: Tensor | None = None
        self.tokens = 0
        self.kept: list[Tensor] = []

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Observe ``keys [B, Hkv, S, D]`` and return both."""
        self.amax = maximum((self.amax, keys.abs().amax((0, 2)).float()))
        total = keys.sum((0, 2), dtype=torch.float64)
        self.total = total if self.total is None else self.total + total
        tokens = keys.shape[0] * keys.shape[2]
        self.tokens += tokens
        if self.share:
            count = max(1, round(self.share * tokens))
            chosen = torch.randperm(tokens, generator=self.random)[:count].to(keys.device)
            self.kept.append(keys.transpose(0, 1).flatten(1, 2)[:, chosen].float())
        return keys, values


@dataclass
class Keys:
    """Statistics of all ranks' keys after RoPE, float32.

    ``amax`` and ``mean`` are ``[Hkv, D]``, ``sample`` is random ``[Hkv, T, D]``.
    """

    amax: Tensor
    mean: Tensor
    sample: Tensor

    def of_channels(self, order: Tensor) -> "Keys":
        """These keys with their channels in ``order [D]``."""
        return Keys(*(x[..., order] for x in (self.amax, self.mean, self.sample)))


def observe_keys(
    block: Block, batches: Sequence[Batch], tokens: int = 0, seed: int = 0
) -> Keys | None:
    """The keys of one run of ``block``, about ``tokens`` of them in the sample; or None.

    Each batch is sampled at other positions, since RoPE rotates all keys of a position alike.
    """
    total, seen = count_tokens(batches), []
    numbers = ranks.local_items(range(len(batch_shapes(batches))))
    for number, batch in zip(numbers, batches, strict=True):
        observer = KeyObserver(tokens / total, seed + number)
        run(block, batch, **block.with_cache(observer))
        seen.append((observer.amax, observer.total, observer.tokens, observer.kept))
    every = ranks.all_gather_batches(seen)
    amax = maximum(amax for amax, _, _, _ in every)
    if amax is None:
        return None
    sample = [keys for *_, kept in every for keys in kept] or [amax[:, None][:, :0]]
    sums = torch.stack([total for _, total, _, _ in every if total is not None]).sum(0)
    mean = sums / sum(tokens for _, _, tokens, _ in every)
    return Keys(amax, mean.float(), torch.cat(sample, 1))


class SmoothedKV4:
    """A KV cache of 4-bit keys after ``transform``; the keys have the mean ``mean [Hkv, D]``.

    All of these have their channels in ``order`` (:func:`.pair_order`); keys that are given and
    returned have not.
    """

    def __init__(
        self, transform: KeyTransform, mean: Tensor, queries: Queries, order: Tensor
    ) -> None:
        self.transform, self.order, self.back = transform, order, order.argsort()
        self.quantizer = KV4(transform.keys(mean[:, None])[:, 0], queries.importance(transform))

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys ``[B, Hkv, S, D]`` as attention reads them."""
        packed = self.quantizer.quantize(self.transform.keys(keys.float()[..., self.order]))
        read = self.transform.original(self.quantizer.dequantize(packed))
        return read[..., self.back].to(keys.dtype), values


def _scales(family: Family) -> bool:
    """Whether a block of this family has queries and keys that a factor can be folded into."""
    return family.attention is not None or bool(family.kv_cache and family.kv_cache.k_norm)


@dataclass(kw_only=True)
class SmoothAttention(Transform):
    """Folds a transform of the keys into the weights that make keys and queries.

    Args:
        alphas: exponents to choose from; the paper has ``[0.5]``.
        steps: steps of the fit, which is not in the paper; 0 leaves it out.
        starts: number of starts of the fit: the first without a phase, the others with random ones.
        tokens: size of the random sample of keys; the fit uses one half, and the other half decides
            between the starts.
        sequences: number of calibration sequences for observing the queries and for the choice.
        seed: seed of the random sample and of the random starts.
    """

    alphas: Sequence[float] = (0.5, 1.0)
    steps: int = 100
    starts: int = 8
    tokens: int = 2048
    sequences: int = 16
    seed: int = 0

    name = "smooth-attention"
    needs_data = True
    positive = ("starts", "sequences")
    most: ClassVar[dict[str, float]] = {"alphas": 1}
    after: ClassVar[dict[str, str]] = {
        "rotate": "the inputs a block is observed on are rotated from the start"
    }

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        if not _scales(block.family):
            return
        keys = observe_keys(block, batches, self.tokens, self.seed)
        if keys is None:
            return
        few = subset(batches, self.sequences)
        if (queries := queries_of(block, few)) is None:
            return
        order = pair_order(block, keys.mean.shape[1])
        keys, queries = keys.of_channels(order), queries.of_channels(order)
        candidates = self.candidates(block, keys, queries)
        caches = {n: SmoothedKV4(t, keys.mean, queries, order) for n, t in candidates.items()}
        errors = cache_errors(block, few, caches)
        best = min(errors, key=lambda name: errors[name])
        fold(block, candidates[best])
        block.notes["smooth-attention"] = {
            "choice": best,
            "error": errors[best],
            "error_unsmoothed": errors["none"],
        }

    def work(self, block: BlockShape) -> Work:
        if not _scales(block.family):
            return Work()
        few = min(1.0, self.sequences / block.samples)
        candidates = 1 + len(self.alphas) + bool(self.steps)
        # the keys of all, the outputs of few exactly and with each candidate, and their queries
        whole = Work(forward_flops=block.forward_flops()) * (1 + few * (1 + candidates))
        return whole + super().work(block) * few

    def candidates(self, block: Block, keys: Keys, queries: Queries) -> dict[str, KeyTransform]:
        """The transforms to choose from, by their names in the notes."""
        amax, rotary, shared = keys.amax, rotary_dim(block), shared_norm(block)
        still = amax.new_zeros(len(amax), rotary // 2)
        factors = {"none": 0.0} | {f"alpha {alpha}": alpha for alpha in self.alphas}
        found = {
            name: KeyTransform(key_factor(amax, a, rotary, shared), still)
            for name, a in factors.items()
        }
        if self.steps and keys.sample.shape[1]:
            centred = keys.sample - keys.mean[:, None]
            # a pair that keys hardly use starts at a thousandth of the largest, because its factor
            # has no upper limit
            start = key_factor(amax.clamp_min(1e-3 * float(amax.amax())), 0.5, rotary, shared)
            turns = query_and_key_norm(block) is None and rotary > 0  # a norm cannot rotate
            phases = self.phases(still) if turns else still[None]
            looked, held = centred.tensor_split(2, dim=1)
            fitted = fit(
                looked, queries.power, start, phases, shared=shared, turns=turns, steps=self.steps
            )
            found["fitted"] = least_score_error(fitted, held, queries)
        return found

    def phases(self, still: Tensor) -> Tensor:
        """Phases ``[C, Hkv, R/2]``: ``still [Hkv, R/2]``, which is zeros, and random ones."""
        random = torch.rand(
            self.starts - 1, *still.shape, generator=torch.Generator().manual_seed(self.seed)
        )
        return torch.cat([still[None], math.pi * random.to(still.device)])


def least_score_error(transforms: KeyTransform, keys: Tensor, queries: Queries) -> KeyTransform:
    """For each head the one of C ``transforms`` whose 4-bit keys change the scores least.

    The mean of ``keys [Hkv, T, D]`` is 0.
    """
    candidates = list(map(KeyTransform, transforms.factor, transforms.phase))

    def error(transform: KeyTransform) -> Tensor:
        quantizer, moved = KV4(None, queries.importance(transform)), transform.keys(keys)[None]
        return queries.score_error(
            transform.original(quantizer.dequantize(quantizer.quantize(moved))[0]) - keys
        )

    best = torch.stack([error(transform) for transform in candidates]).argmin(0)  # [Hkv]
    heads = torch.arange(len(best), device=best.device)
    return KeyTransform(transforms.factor[best, heads], transforms.phase[best, heads])


def cache_errors(
    block: Block, batches: Sequence[Batch], caches: Mapping[str, Any]
) -> dict[str, float]:
    """Squared error of the block's output with each of ``caches`` in place of its KV cache."""
    exact = [run(block, batch) for batch in batches]

    def error_of(cache: Any) -> float:
        outputs = (run(block, batch, **block.with_cache(cache)) for batch in batches)
        return sum(
            float((o - e).double().square().sum()) for o, e in zip(outputs, exact, strict=True)
        )

    return dict(zip(caches, ranks.map_items(error_of, list(caches.values())), strict=True))


def fold(block: Block, transform: KeyTransform) -> None:
    """Transform the keys and queries of ``block``, in place.

    Norms after the projections take only the factors.
    """
    factor, norms = transform.factor.double(), query_and_key_norm(block)
    order = pair_order(block, factor.shape[1])
    back = order.argsort()
    if norms and shared_norm(block):
        block.scale_norm(norms[0], factor[0, back])
        block.scale_norm(norms[1], 1 / factor[0, back])
        return
    attention, heads = block.attention, block.heads
    group = heads.query // heads.kv
    if norms:
        block.scale_norm(norms[0], factor[:, back].repeat_interleave(group, 0).flatten())
        block.scale_norm(norms[1], 1 / factor[:, back].flatten())
        return
    exact = KeyTransform(factor, transform.phase.double())

    def change(apply: Any, rows: Tensor, shared: int) -> Tensor:
        by_head = rows.double().view(heads.kv, shared, heads.dim, -1)  # [Hkv, heads of it, D, K]
        channels = by_head[:, :, order].permute(1, 3, 0, 2)[..., None, :]
        changed = apply(channels)[..., 0, :].permute(2, 0, 3, 1)
        return changed[:, :, back].reshape(rows.shape)

    block.change_rows(attention.k, lambda rows: change(exact.keys, rows, 1))
    block.change_rows(attention.q, lambda rows: change(exact.queries, rows, group))
