"""The options of least divergence within a number of bits."""

from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from qtool.pipeline.allocation import Group, Option, allocations, best_allocation


def test_each_step_saves_most_for_its_bits() -> None:
    groups: list[Group] = [(0, ("a",)), (0, ("b",)), (1, ("a",))]
    costs = [(9.0, 4.0, 1.0), (3.0, 2.9, 0.5), (1.0, 2.0, 0.0)]
    options = {
        group: [Option(str(bits), bits, kl) for bits, kl in zip((4, 5, 8), kls, strict=True)]
        for group, kls in zip(groups, costs, strict=True)
    }
    path = [tuple(of[group].bits for group in groups) for of in allocations(options)]
    assert path == [(4, 4, 4), (5, 4, 4), (8, 4, 4), (8, 8, 4), (8, 8, 8)]


def test_what_a_large_change_leaves_of_the_budget_is_spent_on_smaller_ones() -> None:
    options: dict[Group, list[Option]] = {
        (0, ("a",)): [Option("small", 40, 10.0), Option("large", 80, 0.0)],
        (0, ("b",)): [Option("small", 4, 1.0), Option("large", 8, 0.5)],
    }
    assert [tuple(o.bits for o in of.values()) for of in allocations(options)] == [
        (40, 4),
        (80, 4),
        (80, 8),
    ]
    assert [option.bits for option in best_allocation(options, 50).values()] == [40, 8]


@given(
    groups=st.lists(
        st.lists(st.tuples(st.integers(1, 40), st.floats(0, 9)), min_size=1, max_size=4),
        min_size=1,
        max_size=5,
    ),
    share=st.floats(0, 1.1),
)
@example(groups=[[(1, 5e-324), (3, 0.0)]], share=0.0)  # half of the smallest float is 0
def test_no_other_choice_within_the_budget_diverges_less(
    groups: list[list[tuple[int, float]]], share: float
) -> None:
    """Nor is there a better one than a point of the curve for its bits: all are tried."""

    def total(of: Iterable[Option]) -> tuple[int, float]:
        return sum(option.bits for option in of), sum(option.kl for option in of)

    options = {
        (0, (str(i),)): [Option("", bits, kl) for bits, kl in group]
        for i, group in enumerate(groups)
    }
    every = [total(of) for of in product(*options.values())]
    least, most = min(every)[0], max(every)[0]
    budget = least + share * (most - least)
    chosen = best_allocation(options, budget)
    assert all(chosen[group] in of for group, of in options.items())
    points = [total(of.values()) for of in allocations(options)]
    for limit, (bits, kl) in [(budget, total(chosen.values())), *((of[0], of) for of in points)]:
        assert bits <= limit
        assert kl == pytest.approx(min(kl for bits, kl in every if bits <= limit), abs=1e-9)


def test_of_equally_small_choices_the_better_one_is_taken() -> None:
    options = {(0, ("a",)): [Option("worse", 4, 3.0), Option("better", 4, 1.0)]}
    assert [of[0, ("a",)].choice for of in allocations(options)] == ["better"]
