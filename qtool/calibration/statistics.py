"""What transforms look at: the largest input of every channel and a bounded random sample of tokens."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtool.calibration.block import Batch, Block

#: tokens that a linear must have seen for its inputs to be judged by them; only experts see fewer
LEAST_TOKENS = 16


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

    A linear that saw too few tokens (an expert hardly ever chosen) is absent from the result.
    """
    total = count_tokens(batches)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(seed))
    collectors = {name: _Collector(order[:tokens].sort().values) for name in linears}
    block.observe(batches, dict(collectors))
    found = {}
    for name, collector in collectors.items():
        if saw_enough(block, [name], collector.seen, total) and collector.amax is not None:
            found[name] = Inputs(collector.amax, torch.cat(collector.kept))
    return found


def saw_enough(block: Block, linears: Sequence[str], tokens: int, total: int) -> bool:
    """Whether ``tokens`` of ``total`` are enough to judge ``linears`` by; if not, the block's notes name them."""
    if tokens >= min(LEAST_TOKENS, total):
        return True
    note = block.notes.setdefault("rounded by weight alone, tokens seen", {})
    note.update(dict.fromkeys(linears, tokens))
    return False


def count_tokens(batches: Sequence[Batch]) -> int:
    """The tokens of all batches."""
    return sum(batch.hidden.shape[0] * batch.hidden.shape[1] for batch in batches)


def subset(batches: Sequence[Batch], sequences: int) -> list[Batch]:
    """The first batches, as many as hold ``sequences`` sequences: for objectives that run the whole block."""
    chosen, held = [], 0
    for batch in batches:
        if held >= sequences:
            break
        chosen.append(batch)
        held += batch.hidden.shape[0]
    return chosen
