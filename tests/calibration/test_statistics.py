"""The largest inputs over all batches, and who has seen enough to be judged by them."""

import math
from types import SimpleNamespace

import pytest
import torch

from qtool.calibration.batch import Batch, BlockArguments
from qtool.calibration.statistics import (
    LEAST_TOKENS,
    _Collector,
    _positions,
    saw_enough,
    subset,
)


def test_the_largest_of_all_batches_and_the_sampled_positions() -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([1, 5, 6, 11])
    collector = _Collector({0: "one"}, positions)
    for batch in x.split(5):
        collector(batch)
        collector.end_batch([[len(batch)]])
    ((amax, sample, counts),) = collector.collected()
    assert torch.equal(amax, x.abs().amax(0)) and torch.equal(sample, x[positions])
    assert counts == [1, 2, 1]


def test_experts_observed_as_one_keep_what_each_would_keep_alone() -> None:
    x = torch.randn(23, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 2, 3, 7])
    together = _Collector({0: "a", 2: "c", 3: "d"}, positions)  # expert 1 is in 16 bits
    alone = {number: _Collector({0: name}, positions) for number, name in together.names.items()}
    batches = zip(x.split([9, 8, 6]), ([2, 3, 4, 0], [0, 0, 3, 5], [5, 1, 0, 0]), strict=True)
    for batch, counts in batches:
        together(batch, counts)
        together.end_batch([[counts[number]] for number in together.names])
        for number, collector in alone.items():
            collector(part := batch.split(counts)[number])
            collector.end_batch([[len(part)]])
    for (amax, sample, kept), collector in zip(together.collected(), alone.values(), strict=True):
        ((its_amax, its_sample, its_kept),) = collector.collected()
        assert torch.equal(amax, its_amax) and torch.equal(sample, its_sample)
        assert [n for n in kept if n] == [n for n in its_kept if n]


@pytest.mark.parametrize("seen", [LEAST_TOKENS, 100, 5000])
def test_an_expert_that_saw_few_tokens_is_judged_by_enough_of_them(seen: int) -> None:
    """The sample of all tokens would have its share of them: a few, or none."""
    total, tokens = 100_000, 200
    positions = _positions(total, tokens, 0, True)
    assert torch.equal(positions, positions.unique())
    assert LEAST_TOKENS <= int((positions < seen).sum()) <= 2 * LEAST_TOKENS * math.log(seen)
    every = _positions(total, tokens, 0, False)
    assert len(every) - tokens in (0, 1) and torch.isin(every, positions).all()
    assert every[0] == 0  # most models have their massive activations there
    assert len(_positions(total, 0, 0, True)) == 0


def test_sequences_are_counted_not_batches() -> None:
    batches = [Batch(torch.randn(3, 2, 4), BlockArguments([], [])) for _ in range(3)]
    assert [batch.shape[0] for batch in subset(batches, 4)] == [3, 1]
    assert [batch.shape[0] for batch in subset(batches, 20)] == [3, 3, 3]


def test_few_tokens_are_not_enough_and_said() -> None:
    block = SimpleNamespace(notes={})
    assert saw_enough(block, ["a"], LEAST_TOKENS, 1000)
    assert saw_enough(block, ["b"], 3, 3)  # all that there are
    assert block.notes == {}
    assert not saw_enough(block, ["c", "d"], LEAST_TOKENS - 1, 1000)
    assert block.notes == {"rounded by weight alone, tokens seen": {"c": 15, "d": 15}}
