"""What transforms look at: the largest input of every channel and a bounded random sample of tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.calibration.block import Batch, Block


@dataclass
class Inputs:
    """The inputs of one linear: ``amax [K]`` over all tokens, ``sample [T, K]``, both float32."""

    amax: Tensor
    sample: Tensor


class _Collector:
    """Sees a linear's inputs batch by batch and keeps those at ``positions [T]`` (sorted)."""

    def __init__(self, positions: Tensor) -> None:
        self.positions, self.seen = positions, 0
        self.amax: Tensor | None = None
        self.kept: list[Tensor] = []

    def __call__(self, x: Tensor) -> None:
        if not len(x):
            return
        amax = x.abs().amax(0).float()
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        here = self.positions[(self.positions >= self.seen) & (self.positions < self.seen + len(x))] - self.seen
        self.kept.append(x[here.to(x.device)].float())
        self.seen += len(x)


def collect(
    block: Block, batches: Sequence[Batch], linears: Iterable[str], tokens: int, seed: int = 0
) -> dict[str, Inputs]:
    """Run ``block`` once; the inputs of ``linears``, sampled at the same ``tokens`` random positions.

    A linear that saw no token (an expert never chosen) is absent from the result.
    """
    total = sum(batch.hidden.shape[0] * batch.hidden.shape[1] for batch in batches)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    collectors = {name: _Collector(order[:tokens].sort().values) for name in linears}
    block.observe(batches, dict(collectors))
    return {name: Inputs(c.amax, torch.cat(c.kept)) for name, c in collectors.items() if c.amax is not None}


def subset(batches: Sequence[Batch], sequences: int) -> list[Batch]:
    """The first batches, as many as hold ``sequences`` sequences: for objectives that run the whole block."""
    chosen, held = [], 0
    for batch in batches:
        if held >= sequences:
            break
        chosen.append(batch)
        held += batch.hidden.shape[0]
    return chosen
