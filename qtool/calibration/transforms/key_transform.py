"""A factor and a rotation of each pair of key channels, fitted so that keys survive 4 bits.

RoPE rotates the channels i and j = i + R/2 of a head as a pair, and this commutes with any rotation
and any scaling of the pair. So each pair of each kv head may have a factor and a phase (QServe
section 3.2 has the factor; the phase is qtool's):

    k_ij <- turn(phi) k_ij / lambda,      q_ij <- turn(phi) q_ij * lambda

Queries stay in 16 bits and a key is quantized in 15 steps between its extremes, so the error of the
scores is, to first order, proportional to

    E[ (max k - min k)^2 ] * sum_d lambda_d^2 E[q_d^2]

with k the transformed keys minus their mean, which the quantizer subtracts too
(:class:`~qtool.schemes.kv.KV4`). :func:`fit` minimizes the logarithm of this error. A factor moves
range to channels whose queries are small, and a phase spreads range between the channels of a pair.
The function has many minima, whose quantization errors differ by a tenth, and the quantization
error does not always fall with the predicted one. So the fit starts from several phases, and the
caller chooses among the results.

Legend: Hkv kv heads, D channels a head, R of them rotated by RoPE, T tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

STEP_SIZE = 0.1  # of Adam, in units of log lambda and radians


@dataclass(frozen=True)
class KeyTransform:
    """``factor [Hkv, D]``, equal within a pair, and ``phase [Hkv, R/2]`` of keys and queries.

    For C transforms at once, both have C as their first dimension.
    """

    factor: Tensor
    phase: Tensor

    def keys(self, keys: Tensor) -> Tensor:
        """``keys [..., Hkv, T, D]`` transformed."""
        return rotate_pairs(keys / self.factor.unsqueeze(-2), self.phase)

    def queries(self, queries: Tensor) -> Tensor:
        """``queries [..., Hkv, T, D]`` of the query heads of each kv head, transformed."""
        return rotate_pairs(queries * self.factor.unsqueeze(-2), self.phase)

    def original(self, keys: Tensor) -> Tensor:
        """The inverse of :meth:`keys`."""
        return rotate_pairs(keys, -self.phase) * self.factor.unsqueeze(-2)


def rotate_pairs(x: Tensor, phase: Tensor) -> Tensor:
    """``x [..., Hkv, T, D]`` with pairs of its first R channels rotated by ``phase [Hkv, R/2]``."""
    half = phase.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cosine, sine = phase.cos().unsqueeze(-2), phase.sin().unsqueeze(-2)
    return torch.cat([first * cosine - second * sine, first * sine + second * cosine, rest], -1)


def key_factor(amax: Tensor, alpha: float, rotary: int, shared: bool) -> Tensor:
    """QServe's ``lambda [Hkv, D]`` from the largest keys ``amax [Hkv, D]``, centred on 1 in a head.

    With ``shared`` all heads have one lambda.
    """
    if shared:
        amax = amax.amax(0, keepdim=True).expand_as(amax)
    pair = torch.maximum(amax[:, : rotary // 2], amax[:, rotary // 2 : rotary])  # [Hkv, R/2]
    # [Hkv, D]; channels that RoPE does not rotate have no partner
    paired = torch.cat([pair, pair, amax[:, rotary:]], 1)
    log = paired.clamp_min(torch.finfo(torch.float32).tiny).log()
    alive = paired > 0
    mean = (log * alive).sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp_min(1)
    return torch.where(alive, (alpha * (log - mean)).exp(), 1.0).clamp(1e-4, 1e4)


def fit(
    keys: Tensor,
    power: Tensor,
    start: Tensor,
    phases: Tensor,
    *,
    shared: bool,
    turns: bool,
    steps: int,
) -> KeyTransform:
    """Transforms of small predicted error, found by Adam from each of C starts.

    Args:
        keys: a sample ``[Hkv, T, D]`` of the keys after RoPE, minus their mean.
        power: mean square ``[Hkv, D]`` of the queries of these keys, summed over the query heads of
            a kv head.
        start: factors ``[Hkv, D]`` at the start.
        phases: phases ``[C, Hkv, R/2]`` at the start.
        shared: all heads get one factor.
        turns: phases are learned too.
    """
    half, keys = phases.shape[2], keys.float()
    log = start.log()
    log = torch.cat([log[:, :half], log[:, 2 * half :]], 1)  # one number for each pair
    log = (log[:1] if shared else log).expand(len(phases), -1, -1).clone().requires_grad_()
    phase = phases.clone().requires_grad_(turns)
    power = power / power.mean(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)

    def transform() -> KeyTransform:
        by_head = log.expand(-1, len(start), -1)
        return KeyTransform(torch.cat([by_head[..., :half], by_head], -1).exp(), phase)

    optimizer = torch.optim.Adam([log, phase] if turns else [log], lr=STEP_SIZE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, total_iters=steps)
    with torch.enable_grad():
        for _ in range(steps):
            loss = predicted_error(transform(), keys, power).log().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    return KeyTransform(transform().factor.detach().clamp(1e-4, 1e4), phase.detach())


def predicted_error(transform: KeyTransform, keys: Tensor, power: Tensor) -> Tensor:
    """``E[range^2] * sum lambda^2 E[q^2]`` of each kv head, ``[Hkv]`` or ``[C, Hkv]``, above 0.

    The mean of ``keys`` is 0.
    """
    key = transform.keys(keys)
    spread = (key.amax(-1) - key.amin(-1)).square().mean(-1)
    return (spread * (transform.factor.square() * power).mean(-1)).clamp_min(
        torch.finfo(torch.float32).tiny
    )
