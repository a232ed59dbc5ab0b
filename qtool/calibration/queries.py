"""Queries as keys meet them: how much an error of each key channel counts.

A score is q k, so the error of a quantized key costs, summed over its channels, E[q_d^2] e_d^2 with the queries
after RoPE. Within a head these powers differ a hundredfold: a slow pair of channels that every query points along
counts for many that average out.

Legend: Hkv kv heads, D channels a head, R of them turned by RoPE, B sequences of S tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.calibration.batch import Batch, to_device
from qtool.calibration.block import Block
from qtool.calibration.key_transform import KeyTransform

#: least importance of a channel, of the mean of its head: none may be lost altogether
LEAST = 1e-3


@dataclass
class Queries:
    """Mean square ``power [Hkv, D]`` of the queries after RoPE and, of each pair that it turns, the mean product
    ``cross [Hkv, R/2]``; both summed over the query heads of a kv head."""

    power: Tensor
    cross: Tensor

    def importance(self, transform: KeyTransform | None = None) -> Tensor:
        """What squared errors of the channels of (transformed) keys count, ``[Hkv, D]``, mean 1 in each head."""
        power = self.power
        if transform is not None:
            half = self.cross.shape[1]
            first, second, rest = power[:, :half], power[:, half : 2 * half], power[:, 2 * half :]
            cosine, sine = transform.phase.cos(), transform.phase.sin()
            mixed = 2 * cosine * sine * self.cross
            turned = [cosine**2 * first + sine**2 * second - mixed, sine**2 * first + cosine**2 * second + mixed, rest]
            power = torch.cat(turned, 1) * transform.factor.square()
        mean = power.mean(1, keepdim=True)
        return torch.where(mean > 0, power / mean, 1.0).clamp_min(LEAST)


@torch.no_grad()
def observe_queries(block: Block, batches: Sequence[Batch]) -> Queries:
    """The queries of ``block`` on ``batches``, at least one."""
    attention, heads, half = block.family.attention, block.heads, rotary_dim(block) // 2
    norm = block.get(attention.q_norm) if attention.q_norm else None
    weight, bias = block.weight(attention.q).float(), block.bias(attention.q)
    powers, crosses, tokens = [], [], 0
    for batch in batches:
        x = block.inputs(batch, block.family.owner(attention.q))
        assert x is not None, "attention always runs"
        queries = torch.nn.functional.linear(x.float(), weight, None if bias is None else bias.float())
        if norm is not None and not shared_norm(block):
            queries = norm(queries)
        queries = queries.view(*batch.hidden.shape[:2], heads.query, heads.dim)
        if norm is not None and shared_norm(block):
            queries = norm(queries)
        queries = positioned(queries, to_device(batch.kwargs[block.index], block.device))
        powers.append(queries.square().sum((0, 1), dtype=torch.float64))
        crosses.append((queries[..., :half] * queries[..., half : 2 * half]).sum((0, 1), dtype=torch.float64))
        tokens += len(x)
    power, cross = (
        (torch.stack(sums).sum(0) / tokens).view(heads.kv, heads.query // heads.kv, -1).sum(1).float()
        for sums in (powers, crosses)
    )
    return Queries(power, cross)


def positioned(queries: Tensor, arguments: dict[str, object]) -> Tensor:
    """``queries [B, S, H, D]`` turned as a block turns them that is given ``arguments``."""
    angles = arguments.get("position_embeddings")
    if angles is None or arguments.get("alibi") is not None:
        return queries
    cosine, sine = (part.float()[:, :, None] for part in angles)  # type: ignore[attr-defined]  # [B or 1, S, 1, R]
    turning, rest = queries.split([cosine.shape[-1], queries.shape[-1] - cosine.shape[-1]], -1)
    first, second = turning.chunk(2, -1)
    return torch.cat([turning * cosine + torch.cat([-second, first], -1) * sine, rest], -1)


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
