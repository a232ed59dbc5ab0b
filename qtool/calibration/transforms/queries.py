"""The power of queries after RoPE: how much an error of each key channel counts.

A score is q k, so the error e of a quantized key costs e^T E[q q^T] e with the queries after RoPE.
A cache uses the diagonal: E[q_d^2] e_d^2 summed over channels. Within a head these powers differ by
a factor of a hundred: a pair of channels that RoPE rotates slowly and that all queries share counts
as much as many pairs that average out.

Legend: Hkv kv heads, D channels a head, R of them rotated by RoPE, B sequences of S tokens, T any
tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from qtool.calibration.batch import Batch, to_device
from qtool.calibration.block import Block
from qtool.calibration.forwards import inputs_of, run
from qtool.calibration.transforms.key_transform import KeyTransform

#: torch's attention
SDPA = torch.nn.functional.scaled_dot_product_attention
#: least importance of a channel relative to the mean of its head, so that no channel is lost
LEAST = 1e-3


@dataclass
class Queries:
    """Mean outer product ``moment [Hkv, D, D]`` of the queries after RoPE.

    The moment is summed over the query heads of a kv head.
    """

    moment: Tensor

    @property
    def power(self) -> Tensor:
        """Mean square of each channel ``[Hkv, D]``."""
        return self.moment.diagonal(dim1=1, dim2=2)

    def importance(self, transform: KeyTransform | None = None) -> Tensor:
        """Weight ``[Hkv, D]`` of a squared error in each key channel, mean 1 in a head.

        With a ``transform`` it is the weight for channels of the transformed keys.
        """
        power = self.power
        if transform is not None:
            half = transform.phase.shape[1]
            cross = self.moment.diagonal(half, 1, 2)[:, :half]  # moment of the channels of a pair
            first, second, rest = power[:, :half], power[:, half : 2 * half], power[:, 2 * half :]
            cosine, sine = transform.phase.cos(), transform.phase.sin()
            mixed = 2 * cosine * sine * cross
            turned = [
                cosine**2 * first + sine**2 * second - mixed,
                sine**2 * first + cosine**2 * second + mixed,
                rest,
            ]
            power = torch.cat(turned, 1) * transform.factor.square()
        mean = power.mean(1, keepdim=True)
        return torch.where(mean > 0, power / mean, 1.0).clamp_min(LEAST)

    def of_channels(self, order: Tensor) -> "Queries":
        """These queries with their channels in ``order [D]``."""
        return Queries(self.moment[:, order][:, :, order])

    def score_error(self, lost: Tensor) -> Tensor:
        """Mean square ``[Hkv]`` of the score errors from the key errors ``lost [Hkv, T, D]``."""
        return ((lost @ self.moment) * lost).sum(2).mean(1)


def queries_of(block: Block, batches: Sequence[Batch]) -> Queries | None:
    """The queries of ``block`` on ``batches``, at least one; None if they cannot be seen."""
    if are_made_as_known(block):
        return observe_queries(block, batches)
    return attending_queries(block, batches)


def are_made_as_known(block: Block) -> bool:
    """Whether it is known how linears, norms and RoPE make the queries of ``block``."""
    attention = block.family.attention
    if attention is None or attention.neighbours:
        return False
    return "smooth-attention" not in block.family.refuses


@torch.no_grad()
def observe_queries(block: Block, batches: Sequence[Batch]) -> Queries:
    """The queries of ``block`` on ``batches``, at least one, from its linears, norms and RoPE."""
    attention, heads = block.attention, block.heads
    norm = block.get(attention.q_norm) if attention.q_norm else None
    weight, bias = block.weight(attention.q).float(), block.bias(attention.q)
    moments, tokens = [], 0
    for batch in batches:
        (x,) = inputs_of(block, batch, block.family.owner(attention.q))
        queries = torch.nn.functional.linear(
            x.float(), weight, None if bias is None else bias.float()
        )
        if norm is not None and not shared_norm(block):
            queries = norm(queries)
        queries = queries.view(*batch.shape, heads.query, heads.dim)
        if norm is not None and shared_norm(block):
            queries = norm(queries)
        if attention.rotary:
            arguments = to_device(batch.kwargs[block.index], block.device)
            queries = apply_rope(queries, arguments, rotary_dim(block))
        # [Hkv, T, D]
        by_head = queries.reshape(len(x), heads.kv, -1, heads.dim).transpose(0, 1).flatten(1, 2)
        moments.append((by_head.mT @ by_head).double())
        tokens += len(x)
    return Queries((torch.stack(moments).sum(0) / tokens).float())


class Attending(TorchFunctionMode):
    """A KV cache that keeps nothing, and the queries that torch's attention multiplies by its keys.

    Attributes:
        moment: sum over tokens of the outer products ``[Hkv, D, D]`` of these queries; None if
            there were none.
        tokens: number of tokens in :attr:`moment`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.keys: Tensor | None = None
        self.moment: Tensor | None = None
        self.tokens = 0

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Remember ``keys [B, Hkv, S, D]`` and return both."""
        self.keys = keys
        return keys, values

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is SDPA:
            self.see(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def see(self, query: Tensor, key: Tensor, *_: Any, **__: Any) -> None:
        """Add queries ``[B, H, S, D]`` if the keys are the cache's, perhaps repeated for them."""
        if (cached := self.keys) is None or query.shape[1] % (heads := cached.shape[1]):
            return
        if not torch.equal(cached.repeat_interleave(key.shape[1] // heads, 1), key):
            return
        by_head = query.transpose(0, 1).reshape(heads, -1, query.shape[-1]).float()
        moment = (by_head.mT @ by_head).double()
        self.moment = moment if self.moment is None else self.moment + moment
        self.tokens += query.shape[0] * query.shape[2]


@torch.no_grad()
def attending_queries(block: Block, batches: Sequence[Batch]) -> Queries | None:
    """The queries of ``block`` on ``batches`` as they meet its keys, whatever makes them.

    None if the block's attention is not torch's, or gets other keys than those of its cache.
    """
    seen = Attending()
    for batch in batches:
        with seen:
            run(block, batch, **block.with_cache(seen))
    return None if seen.moment is None else Queries((seen.moment / seen.tokens).float())


def apply_rope(queries: Tensor, arguments: dict[str, object], rotated: int) -> Tensor:
    """``queries [B, S, H, D]`` after RoPE, as a block with these ``arguments`` applies it.

    RoPE rotates ``rotated`` channels of a head, in pairs i and i + ``rotated`` / 2.
    """
    angles = arguments.get("position_embeddings")
    if angles is None or arguments.get("alibi") is not None:
        return queries
    # [B or 1, S, 1, R]
    cosine, sine = (part.float()[:, :, None] for part in angles)  # type: ignore[attr-defined]
    if 2 * cosine.shape[-1] == rotated:  # GPT-OSS has the angle of each pair only once
        cosine, sine = torch.cat([cosine, cosine], -1), torch.cat([sine, sine], -1)
    turning, rest = queries.split([cosine.shape[-1], queries.shape[-1] - cosine.shape[-1]], -1)
    first, second = turning.chunk(2, -1)
    return torch.cat([turning * cosine + torch.cat([-second, first], -1) * sine, rest], -1)


def rotary_dim(block: Block) -> int:
    """The number of channels of a head that RoPE rotates."""
    if (attention := block.family.attention) is None:
        return block.family.kv_cache.rotary if block.family.kv_cache else 0
    return attention.rotary_dim(block.config) if attention.rotary else 0


def pair_order(block: Block, dim: int) -> Tensor:
    """The channels ``[D]`` of a head, so that RoPE turns the i-th and the (i + R/2)-th together."""
    every, rotary = torch.arange(dim, device=block.device), rotary_dim(block)
    if block.family.attention is None or not block.attention.neighbours:
        return every
    return torch.cat([every[:rotary:2], every[1:rotary:2], every[rotary:]])


def query_and_key_norm(block: Block) -> tuple[str, str] | None:
    """The norms of queries and keys behind their linears, if there are any."""
    part = block.family.attention or block.family.kv_cache
    return (part.q_norm, part.k_norm) if part and part.q_norm and part.k_norm else None


def shared_norm(block: Block) -> bool:
    """Whether one norm weight ``[D]`` serves all heads; it is False with a single kv head."""
    if (attention := block.family.attention) is None:
        return query_and_key_norm(block) is not None
    norm, heads = attention.q_norm, block.heads
    return norm is not None and block.weight(norm).numel() < heads.query * heads.dim
