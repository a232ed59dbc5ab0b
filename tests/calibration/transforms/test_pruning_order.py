"""An order for pruning: a permutation in which less and less is left out."""

import pytest
import torch
from torch import Tensor

from qtool.calibration.transforms.pruning_order import left_out, pruning_order


def importance(channels: int, rows: int = 40) -> Tensor:
    random = torch.Generator().manual_seed(0)
    loud = torch.randn(channels, generator=random).exp()
    return torch.randn(rows, channels, generator=random).square() * loud


def lost(scores: Tensor, order: Tensor, sparsity: tuple[int, int]) -> float:
    n, m = sparsity
    groups = scores[:, order].unflatten(1, (-1, m)).sort(-1).values
    return float(groups[..., : m - n].sum())


@pytest.mark.parametrize("sparsity", [(2, 4), (1, 4), (4, 8), (1, 2)])
def test_less_is_left_out_after_every_round(sparsity: tuple[int, int]) -> None:
    scores = importance(72)  # an odd number of groups of 8
    orders = [pruning_order(scores, sparsity, rounds) for rounds in (0, 1, 10, 100, 300)]
    found = [lost(scores, order, sparsity) for order in orders]
    assert orders[0].tolist() == list(range(72)) == sorted(orders[-1].tolist())
    assert found == sorted(found, reverse=True) and found[-1] < 0.9 * found[0]
    assert torch.equal(orders[-1], pruning_order(scores, sparsity, 300))


def test_large_channels_do_not_share_a_group() -> None:
    scores = torch.ones(3, 8)
    scores[:, :4] = 100
    assert lost(scores, pruning_order(scores, (2, 4)), (2, 4)) == 3 * 4 < 3 * 200


def test_one_group_stays() -> None:
    assert pruning_order(importance(4), (2, 4)).tolist() == [0, 1, 2, 3]


def test_what_is_left_out_is_the_least_sum() -> None:
    groups = torch.tensor([4.0, 1.0, 3.0, 2.0]).view(4, 1, 1)
    assert [float(left_out(groups, n)) for n in (1, 2, 3)] == [6, 3, 1]
