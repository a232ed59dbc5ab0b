"""SmoothAttention: key channels are scaled down, query channels up, so that 4-bit keys hold.

QServe section 3.2. On post-RoPE keys K [Hkv, D], for the channels i and j that RoPE turns together
(j = i + D/2 in Llama-like models):

    lambda_i = lambda_j = max(max|K_i|, max|K_j|)^alpha      W_q <- Lambda W_q,   W_k <- Lambda^-1 W_k

and the biases with them. One lambda per kv head, which its query heads share. Where norms follow the
projections (Qwen3) the factor goes into their weights: one lambda for all heads then.

The paper's alpha = 0.5 serves most models; keys with strong outliers want more. Of several, the one with
the least block-output error under 4-bit keys wins; 0 (no smoothing) is always among them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtool import ranks
from qtool.calibration.block import Batch, Block
from qtool.calibration.folding import scale_rows
from qtool.calibration.method import Transform
from qtool.calibration.statistics import maximum, subset
from qtool.schemes.kv import KV4


class KeyObserver:
    """Stands in for the KV cache: what attention hands to it are the keys after RoPE."""

    def __init__(self) -> None:
        self.amax: Tensor | None = None  # [Hkv, D]

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Note ``keys [B, Hkv, S, D]`` and hand both back."""
        amax = keys.abs().amax((0, 2)).float()
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        return keys, values


class SmoothedKV4:
    """Stands in for a KV cache of 4-bit keys that were divided by ``factor [Hkv, D]`` before."""

    def __init__(self, factor: Tensor) -> None:
        self.factor, self.quantizer = factor[:, None], KV4()  # [Hkv, 1, D]

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """The keys ``[B, Hkv, S, D]`` as attention will see them."""
        packed = self.quantizer.quantize(keys / self.factor)
        return (self.quantizer.dequantize(packed) * self.factor).to(keys.dtype), values


@dataclass(kw_only=True)
class SmoothAttention(Transform):
    """Fold a smoothing factor between queries and keys.

    Args:
        alphas: exponents to choose from; ``[0.5]`` is the paper's.
        sequences: how many calibration sequences the choice is made on.
    """

    alphas: Sequence[float] = (0.25, 0.5, 0.75, 1.0)
    sequences: int = 16

    name = "smooth-attention"
    needs_data = True
    after: ClassVar[dict[str, str]] = {"rotate": "the inputs a block is observed on are rotated from the start"}

    @torch.no_grad()
    def apply(self, block: Block, batches: Sequence[Batch]) -> None:
        observer = KeyObserver()
        for batch in batches:
            block.run(batch, past_key_values=observer)
        if (amax := maximum(observer.amax)) is None:
            return
        shared = shared_norm(block)
        factors = {alpha: key_factor(amax, alpha, rotary_dim(block), shared) for alpha in (0.0, *self.alphas)}
        errors = key_errors(block, subset(batches, self.sequences), factors)
        best = min(errors, key=lambda alpha: errors[alpha])
        fold(block, factors[best])
        block.notes["smooth-attention"] = {"alpha": best, "error": errors[best], "error_unsmoothed": errors[0.0]}


def key_errors(block: Block, batches: Sequence[Batch], factors: dict[float, Tensor]) -> dict[float, float]:
    """Squared block-output error of 4-bit keys under each factor."""
    exact = [block.run(batch) for batch in batches]

    def error_of(factor: Tensor) -> float:
        outputs = (block.run(batch, past_key_values=SmoothedKV4(factor)) for batch in batches)
        return sum(float((o - e).double().square().sum()) for o, e in zip(outputs, exact, strict=True))

    return dict(zip(factors, ranks.spread(error_of, list(factors.values())), strict=True))


def key_factor(amax: Tensor, alpha: float, rotary: int, shared: bool) -> Tensor:
    """``lambda [Hkv, D]`` from the largest keys ``amax [Hkv, D]``, centred on 1 in each head."""
    if shared:
        amax = amax.amax(0, keepdim=True).expand_as(amax)
    first, second = amax[:, : rotary // 2], amax[:, rotary // 2 : rotary]
    pair = torch.maximum(first, second)  # [Hkv, R/2]
    paired = torch.cat([pair, pair, amax[:, rotary:]], 1)  # [Hkv, D]; channels RoPE leaves alone have no partner
    log = paired.clamp_min(torch.finfo(torch.float32).tiny).log()
    alive = paired > 0
    mean = (log * alive).sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp_min(1)
    return torch.where(alive, (alpha * (log - mean)).exp(), 1.0).clamp(1e-4, 1e4)


def rotary_dim(block: Block) -> int:
    """How many channels of a head RoPE turns."""
    dim = block.heads.dim
    if not block.family.attention.rotary:
        return 0
    scaling = getattr(block.config, "rope_parameters", None) or {}
    factor = scaling.get("partial_rotary_factor") or getattr(block.config, "partial_rotary_factor", None) or 1.0
    return int(dim * factor)


def shared_norm(block: Block) -> bool:
    """Whether one norm weight ``[D]`` serves all heads."""
    norm = block.family.attention.k_norm
    return norm is not None and block.weight(norm).numel() == block.heads.dim


def fold(block: Block, factor: Tensor) -> None:
    """Keys divided by ``factor [Hkv, D]``, queries multiplied by it, in place."""
    attention, heads = block.family.attention, block.heads
    queries = factor.repeat_interleave(heads.query // heads.kv, 0)  # [Hq, D]
    if shared_norm(block):
        factor, queries = factor[:1], queries[:1]
    if attention.k_norm and attention.q_norm:
        block.scale_norm(attention.k_norm, 1 / factor.double().flatten())
        block.scale_norm(attention.q_norm, queries.double().flatten())
    else:
        scale_rows(block, attention.k, 1 / factor.double().flatten())
        scale_rows(block, attention.q, queries.flatten())
