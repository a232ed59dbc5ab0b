"""Chooses one option for each group of linears, under a limit on their bits.

:func:`best_allocation` solves this multiple-choice knapsack (Sinha and Zoltners, 1979) exactly.
:func:`allocations` is the greedy algorithm; each of its points is the best for its own number of
bits.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeAlias

#: a block, and the names of linears within it
Group: TypeAlias = tuple[int, tuple[str, ...]]


@dataclass(frozen=True)
class Option:
    """A group in one scheme: the choice, the bits of all its weights, and its own divergence."""

    choice: str
    bits: int
    kl: float


def allocations(options: Mapping[Group, Sequence[Option]]) -> Iterator[dict[Group, Option]]:
    """Allocations from the smallest option of every group on, each with one group changed.

    The change lowers the divergence most for each bit. These are the vertices of the lower convex
    hull of all allocations: none with as few bits has less divergence.
    """
    chosen = {
        group: min(of, key=lambda option: (option.bits, option.kl)) for group, of in options.items()
    }
    while True:
        yield dict(chosen)
        changes = [
            ((chosen[group].kl - option.kl) / more, group, option)
            for group, of in options.items()
            for option in of
            if (more := option.bits - chosen[group].bits) > 0 and option.kl < chosen[group].kl
        ]
        if not changes:
            return
        _, group, option = max(changes, key=lambda change: change[0])
        chosen[group] = option


def best_allocation(
    options: Mapping[Group, Sequence[Option]], budget: float
) -> dict[Group, Option]:
    """The allocation of least divergence within ``budget`` bits.

    It is found by dynamic programming, group by group. A partial allocation is dropped if another
    one has fewer bits and diverges less, or if the Lagrangian bound excludes it: with a ``price``
    for each bit (that of the step beyond the budget), no allocation costs less than the vertex
    ``below``, and one that costs ``slack`` more cannot diverge less within the budget.

    Args:
        budget: number of bits, at least that of the smallest options.
    """
    below, total = {}, (0, 0.0)
    for above in allocations(options):
        bits, kl = sum(o.bits for o in above.values()), sum(o.kl for o in above.values())
        if bits > budget:
            break
        below, total = above, (bits, kl)
    else:
        return below
    price = (total[1] - kl) / (bits - total[0])
    # the relative error of sums, and the absolute one of numbers too small for one
    rounding = 1e-9 * (total[1] + price * total[0]) + sys.float_info.min
    slack, least = price * (budget - total[0]) + rounding, 0.0
    partial: list[tuple[int, float, Any]] = [(0, 0.0, None)]  # bits, divergence, linked options
    for of in options.values():
        least += min(option.kl + price * option.bits for option in of)
        longer = [
            (bits + option.bits, kl + option.kl, (option, before))
            for bits, kl, before in partial
            for option in of
        ]
        partial = []
        for bits, kl, after in sorted(longer, key=itemgetter(0, 1)):
            if kl + price * bits <= least + slack and (not partial or kl < partial[-1][1]):
                partial.append((bits, kl, after))
    *_, after = max((one for one in partial if one[0] <= budget), key=itemgetter(0))
    found = []
    while after:
        option, after = after
        found.append(option)
    return dict(zip(options, reversed(found), strict=True))
