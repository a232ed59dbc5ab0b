"""Statistics of linears' inputs: the largest of each channel, and a random sample of tokens.

Each rank observes its own batches; the results are the same on all of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from math import inf

import torch
from torch import Tensor

from qtool.calibration.batch import Batch, Batches
from qtool.calibration.block import Block
from qtool.calibration.forwards import by_place, observe
from qtool.distributed import ranks
from qtool.models.experts import expert_place

#: least tokens of a linear for statistics of its inputs; only experts see fewer
LEAST_TOKENS = 16
#: calibration tokens from which transforms take these statistics; more change little
MOST_TOKENS = 1 << 16


@dataclass
class Inputs:
    """The inputs of one linear: ``amax [K]`` over all tokens, ``sample [T, K]``, both float32."""

    amax: Tensor
    sample: Tensor


class _Collector:
    """Keeps inputs of linears at ``positions [T]`` (sorted) of all tokens that each sees.

    Args:
        names: the linears that are observed as one, by the expert's number.

    Attributes:
        seen: number of tokens of each linear.
        amax: largest inputs ``[E, K]`` of each expert.
        waiting: inputs of a batch, sorted by expert, and their counts.
        kept: kept inputs of each linear.
        counts: number of inputs of each turn that are kept, by linear.
    """

    def __init__(self, names: Mapping[int, str], positions: Tensor) -> None:
        self.names, self.positions = names, positions
        self.seen = dict.fromkeys(names, 0)
        self.amax: Tensor | None = None
        self.waiting: list[tuple[Tensor, Sequence[int]]] = []
        self.kept: dict[int, list[Tensor]] = {number: [] for number in names}
        self.counts: dict[int, list[int]] = {number: [] for number in names}

    def __call__(self, x: Tensor, counts: Sequence[int] = ()) -> None:
        if not len(x):
            return
        counts = counts or [len(x)]
        amax = segment_amax(x.abs(), counts).float()
        self.amax = maximum((self.amax, amax))
        self.waiting.append((x, counts))

    @property
    def new_tokens(self) -> list[int]:
        """The number of tokens of each linear in the last batch."""
        return [sum(counts[number] for _, counts in self.waiting) for number in self.names]

    def end_batch(self, tokens: Sequence[Sequence[int]]) -> None:
        """Keep sampled inputs of the last batch; ``tokens`` counts each linear's on all ranks."""
        kept = dict.fromkeys(self.names, 0)
        place = {  # position of the next token that this rank saw
            number: self.seen[number] + sum(of_ranks[: ranks.rank()])
            for number, of_ranks in zip(self.names, tokens, strict=True)
        }
        for x, counts in self.waiting:
            picked = self._sampled_rows(place, counts)
            sample = x[torch.cat(picked).to(x.device, non_blocking=True)].float()
            parts = sample.split([len(rows) for rows in picked])
            for number, part in zip(self.names, parts, strict=True):
                self.kept[number].append(part)
                kept[number] += len(part)
                place[number] += counts[number]
        for number, of_ranks in zip(self.names, tokens, strict=True):
            self.counts[number].append(kept[number])
            self.seen[number] += sum(of_ranks)
        self.waiting = []

    def _sampled_rows(self, place: Mapping[int, int], counts: Sequence[int]) -> list[Tensor]:
        """Rows of the sampled inputs of each linear, among inputs sorted by expert.

        Args:
            place: the position of a linear's first input among all tokens that it sees.
            counts: the number of inputs of each expert.
        """
        first_rows = [0, *accumulate(counts)]
        spans = [[start, start + counts[number]] for number, start in place.items()]
        cuts = torch.searchsorted(self.positions, torch.tensor(spans)).tolist()
        return [
            self.positions[first:last] - start + first_rows[number]
            for (number, start), (first, last) in zip(place.items(), cuts, strict=True)
        ]

    def collected(self) -> list[tuple[Tensor | None, Tensor | None, list[int]]]:
        """The values to gather: each linear's largest inputs, its sampled inputs, and counts."""
        return [
            (
                None if self.amax is None else self.amax[number],
                torch.cat(self.kept[number]) if self.kept[number] else None,
                self.counts[number],
            )
            for number in self.names
        ]


def segment_amax(x: Tensor, counts: Sequence[int]) -> Tensor:
    """The maximum ``[E, K]``, at least 0, over the rows of each expert in ``x [P, K]``."""
    if len(counts) == 1:
        return x.amax(0, keepdim=True)
    expert = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    rows = expert.to(x.device, non_blocking=True)[:, None].expand_as(x)
    return x.new_zeros(len(counts), x.shape[1]).scatter_reduce_(0, rows, x, "amax")


@lru_cache(maxsize=8)
def _positions(total: int, tokens: int, seed: int, routed: bool) -> Tensor:
    """The sampled positions of ``total`` tokens, drawn once for all blocks.

    The first token, where most models have their massive activations, is always sampled.
    An expert may see only a few of all tokens. So with ``routed`` its n-th token is also sampled
    with the probability :data:`LEAST_TOKENS` / n: the first tokens always, later ones less often.
    """
    random = torch.Generator().manual_seed(seed)
    chosen = torch.zeros(total, dtype=torch.bool)
    chosen[torch.randperm(total, generator=random)[:tokens]] = True
    chosen[: min(tokens, 1)] = True
    if routed and tokens:
        numbers = torch.arange(1, total + 1)
        chosen |= torch.rand(total, generator=random) * numbers < LEAST_TOKENS
    return chosen.nonzero().flatten()


def collect(
    block: Block, batches: Sequence[Batch], linears: Iterable[str], tokens: int, seed: int = 0
) -> dict[str, Inputs]:
    """The inputs of ``linears`` in one run, at the first and ``tokens`` random positions.

    The positions are the same for all linears. An expert, which sees a share of the tokens, has
    that share of the sample and a few more (:func:`_positions`). A linear that saw too few tokens
    (an expert that is hardly ever chosen) is absent from the result.
    """
    total, collectors = count_tokens(batches), {}
    for place, of_place in by_place(block, linears).items():
        an_experts = expert_place(block.module, next(iter(of_place.values()))) is not None
        collectors[place] = _Collector(of_place, _positions(total, tokens, seed, an_experts))
    _observe_all(block, batches, collectors)
    names = [name for collector in collectors.values() for name in collector.names.values()]
    seen = [n for collector in collectors.values() for n in collector.seen.values()]
    own = [value for collector in collectors.values() for value in collector.collected()]
    found = {}
    for name, count, of_ranks in zip(
        names, seen, zip(*ranks.all_gather(own), strict=True), strict=True
    ):
        amax = maximum([amax for amax, _, _ in of_ranks])
        turns = [
            [[x] for x in kept.split(counts)] if kept is not None else [[]] * len(counts)
            for _, kept, counts in of_ranks
        ]
        sample = [x for turn in ranks.interleave(turns) for x in turn]
        if saw_enough(block, [name], count, total) and amax is not None:
            found[name] = Inputs(amax, torch.cat(sample))
    return found


def _observe_all(
    block: Block, batches: Sequence[Batch], collectors: Mapping[str, _Collector]
) -> None:
    """Give all batches to ``collectors``, in turns of one batch of each rank.

    After each turn a collector is told how many tokens every rank's batch had for its linears,
    since it samples by the position among the tokens of all ranks.
    """
    sizes = [count * length for count, length in batch_shapes(batches)]
    linears = sum(len(collector.names) for collector in collectors.values())
    # an expert's tokens are known only after it has run
    routed = any(group.routed for group in block.family.groups)
    for turn in range(-(-len(sizes) // ranks.size())):
        if turn < len(batches):
            observe(block, [batches[turn]], collectors)
        of_ranks = sizes[turn * ranks.size() : (turn + 1) * ranks.size()]
        new = [[size] * linears for size in of_ranks]
        if routed:
            new = ranks.all_gather([n for c in collectors.values() for n in c.new_tokens])
        of_linears = zip(*new, strict=True)
        for collector in collectors.values():
            collector.end_batch(list(islice(of_linears, len(collector.names))))


def maximum(parts: Iterable[Tensor | None]) -> Tensor | None:
    """The elementwise maximum of ``parts``, such as those of all ranks; None if all are None."""
    found = [amax for amax in parts if amax is not None]
    return torch.stack(found).amax(0) if len(found) > 1 else next(iter(found), None)


def saw_enough(block: Block, linears: Sequence[str], tokens: int, total: int) -> bool:
    """Whether ``tokens`` of ``total`` are enough for ``linears``; if not, a note says so."""
    if tokens >= min(LEAST_TOKENS, total):
        return True
    note = block.notes.setdefault("rounded by weight alone, tokens seen", {})
    note.update(dict.fromkeys(linears, tokens))
    return False


def count_tokens(batches: Sequence[Batch]) -> int:
    """The number of tokens of all batches of all ranks."""
    return sum(count * length for count, length in batch_shapes(batches))


def batch_shapes(batches: Sequence[Batch]) -> list[tuple[int, int]]:
    """``(B, S)`` of all ranks' batches, in order; gathered unless :class:`Batches` has them."""
    if isinstance(batches, Batches):
        return batches.shapes
    return ranks.all_gather_batches([batch.shape for batch in batches])


def own_subset(
    batches: Sequence[Batch], sequences: float = inf, tokens: float = inf
) -> list[Batch]:
    """This rank's share of the first batches that hold so many ``sequences`` or ``tokens``.

    Batches are taken whole.
    """
    count = held = seen = 0
    for size, length in batch_shapes(batches):
        if held >= sequences or seen >= tokens:
            break
        count, held, seen = count + 1, held + size, seen + size * length
    return list(batches[: len(ranks.local_items(range(count)))])


def subset(batches: Sequence[Batch], sequences: int) -> list[Batch]:
    """The first ``sequences`` sequences, for objectives that run the whole block.

    All ranks get all of these sequences, since the ranks share the candidates of a search.
    """
    found = own_subset(batches, sequences)
    if ranks.size() > 1:
        found = ranks.all_gather_batches([batch.plain() for batch in found])
    if found and (extra := sum(batch.shape[0] for batch in found) - sequences) > 0:
        found[-1] = found[-1].part(slice(found[-1].shape[0] - extra))
    return found
