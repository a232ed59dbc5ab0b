"""Statistics of linears' inputs: the largest of each channel, and a random sample of tokens.

Each rank observes its own batches; the results are the same on all of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from qtool.calibration.batch import Batch, Batches
from qtool.calibration.block import Block
from qtool.calibration.forwards import observe
from qtool.distributed import ranks

#: tokens that a linear must have seen for its inputs to be judged by them; only experts see fewer
LEAST_TOKENS = 16


@dataclass
class Inputs:
    """The inputs of one linear: ``amax [K]`` over all tokens, ``sample [T, K]``, both float32."""

    amax: Tensor
    sample: Tensor


class _Collector:
    """Keeps a linear's inputs at ``positions [T]`` (sorted) of all tokens it sees.

    Attributes:
        there: the positions on the device of the inputs. kept, counts: inputs, and how many of each
            turn.
    """

    def __init__(self, positions: Tensor, there: Tensor) -> None:
        self.positions, self.there, self.seen = positions, there, 0
        self.amax: Tensor | None = None
        self.waiting: list[Tensor] = []
        self.kept: list[Tensor] = []
        self.counts: list[int] = []

    def __call__(self, x: Tensor) -> None:
        if not len(x):
            return
        amax = x.abs().amax(0).float()
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)
        self.waiting.append(x)

    @property
    def new_tokens(self) -> int:
        """Tokens of the batch that was run last."""
        return sum(map(len, self.waiting))

    def end_batch(self, tokens: Sequence[int]) -> None:
        """Keep the sampled inputs of the last batch; ``tokens`` are the counts of all ranks."""
        start, count = self.seen + sum(tokens[: ranks.rank()]), 0
        for x in self.waiting:
            first, last = torch.searchsorted(
                self.positions, torch.tensor([start, start + len(x)])
            ).tolist()
            self.kept.append(x[self.there[first:last] - start].float())  # a GPU is not waited for
            start, count = start + len(x), count + last - first
        self.counts.append(count)
        self.waiting, self.seen = [], self.seen + sum(tokens)

    def collected(self) -> tuple[Tensor | None, Tensor | None, list[int]]:
        """The values to gather: largest inputs, sampled inputs, and their number by batch."""
        return self.amax, torch.cat(self.kept) if self.kept else None, self.counts


@lru_cache(maxsize=8)
def _positions(total: int, tokens: int, seed: int) -> Tensor:
    """The sampled positions of ``total`` tokens, drawn once for all blocks."""
    return (
        torch.randperm(total, generator=torch.Generator().manual_seed(seed))[:tokens].sort().values
    )


def collect(
    block: Block, batches: Sequence[Batch], linears: Iterable[str], tokens: int, seed: int = 0
) -> dict[str, Inputs]:
    """The inputs of ``linears`` in one run of ``block``, sampled at ``tokens`` random positions.

    The positions are the same for all linears.

    A linear that saw too few tokens (an expert hardly ever chosen) is absent from the result.
    """
    sizes = [count * length for count, length in batch_shapes(batches)]
    total, positions = sum(sizes), _positions(sum(sizes), tokens, seed)
    there = positions.to(block.device)
    collectors = {name: _Collector(positions, there) for name in linears}
    routed = any(
        group.routed for group in block.family.groups
    )  # an expert's tokens are known only when it was run
    for turn in range(-(-len(sizes) // ranks.size())):
        if turn < len(batches):
            observe(block, [batches[turn]], dict(collectors))
        of_ranks = sizes[turn * ranks.size() : (turn + 1) * ranks.size()]
        new = [[size] * len(collectors) for size in of_ranks]
        if routed:
            new = ranks.all_gather([collector.new_tokens for collector in collectors.values()])
        for collector, tokens_new in zip(collectors.values(), zip(*new, strict=True), strict=True):
            collector.end_batch(tokens_new)
    own = [collector.collected() for collector in collectors.values()]
    found = {}
    for (name, collector), parts in zip(
        collectors.items(), zip(*ranks.all_gather(own), strict=True), strict=True
    ):
        amax = maximum([amax for amax, _, _ in parts])
        turns = [
            [[x] for x in kept.split(counts)] if kept is not None else [[]] * len(counts)
            for _, kept, counts in parts
        ]
        sample = [x for turn in ranks.interleave(turns) for x in turn]
        if saw_enough(block, [name], collector.seen, total) and amax is not None:
            found[name] = Inputs(amax, torch.cat(sample))
    return found


def maximum(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The elementwise maximum over the ranks; None if none has a value."""
    found = [amax for amax in parts if amax is not None]
    return torch.stack(found).amax(0) if len(found) > 1 else next(iter(found), None)


def saw_enough(block: Block, linears: Sequence[str], tokens: int, total: int) -> bool:
    """Whether ``tokens`` of ``total`` are enough to judge ``linears``; if not, notes say so."""
    if tokens >= min(LEAST_TOKENS, total):
        return True
    note = block.notes.setdefault("rounded by weight alone, tokens seen", {})
    note.update(dict.fromkeys(linears, tokens))
    return False


def count_tokens(batches: Sequence[Batch]) -> int:
    """The tokens of all batches of all ranks."""
    return sum(count * length for count, length in batch_shapes(batches))


def batch_shapes(batches: Sequence[Batch]) -> list[tuple[int, int]]:
    """``(B, S)`` of all ranks' batches, in order; gathered unless :class:`Batches` has them."""
    if isinstance(batches, Batches):
        return batches.shapes
    return ranks.all_gather_batches(
        [(len(batch.hidden), batch.hidden.shape[1]) for batch in batches]
    )


def own_subset(batches: Sequence[Batch], sequences: int) -> list[Batch]:
    """This rank's share of the first batches that hold ``sequences`` sequences."""
    count = held = 0
    for size, _ in batch_shapes(batches):
        if held >= sequences:
            break
        count, held = count + 1, held + size
    return list(batches[: len(ranks.local_items(range(count)))])


def subset(batches: Sequence[Batch], sequences: int) -> list[Batch]:
    """The first batches that hold ``sequences`` sequences, for objectives that run the whole block.

    All ranks get all of them: the candidates of a search are what is shared out.
    """
    own = own_subset(batches, sequences)
    return (
        own
        if ranks.size() == 1
        else ranks.all_gather_batches([Batch(batch.hidden, batch.kwargs) for batch in own])
    )
