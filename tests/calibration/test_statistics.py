"""The largest inputs over all batches, and who has seen enough to be judged by them."""

from types import SimpleNamespace

import torch

from qtool.calibration.statistics import LEAST_TOKENS, _Collector, saw_enough


def test_the_largest_of_all_batches_and_the_sampled_positions() -> None:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([1, 5, 6, 11])
    collector = _Collector(positions, positions)
    for batch in x.split(5):
        collector(batch)
        collector.end_batch([len(batch)])
    amax, sample, counts = collector.collected()
    assert torch.equal(amax, x.abs().amax(0)) and torch.equal(sample, x[positions])
    assert counts == [1, 2, 1]


def test_few_tokens_are_not_enough_and_said() -> None:
    block = SimpleNamespace(notes={})
    assert saw_enough(block, ["a"], LEAST_TOKENS, 1000)
    assert saw_enough(block, ["b"], 3, 3)  # all that there are
    assert block.notes == {}
    assert not saw_enough(block, ["c", "d"], LEAST_TOKENS - 1, 1000)
    assert block.notes == {"rounded by weight alone, tokens seen": {"c": 15, "d": 15}}
