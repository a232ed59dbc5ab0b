"""How much GPTQ holds at once, from sizes alone: Hessians, problems, inputs of the float block.

Legend: N output channels, K input channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from qtool.calibration.stacking import by_role, in_turn
from qtool.models.family import Family
from qtool.models.parts import LinearGroup

#: most bytes of problems that are solved together; one problem is solved even if it has more
MOST_PROBLEM_BYTES = 2 << 30
#: most bytes of experts' Hessians that are held at once; one is held even if it has more
MOST_HESSIAN_BYTES = 16 << 30
#: most bytes of the float block's inputs that are kept, so that one forward gives all of them
MOST_INPUT_BYTES = 256 << 20


def hessians_in_turn(
    groups: Sequence[LinearGroup], width: Callable[[LinearGroup], int]
) -> Iterator[Sequence[LinearGroup]]:
    """The groups in lists whose Hessians are held at once.

    A list has all groups of a role; of experts it has as many as :data:`MOST_HESSIAN_BYTES` holds.
    ``width`` gives the input channels of a group.
    """
    for alike in by_role(groups):
        size = hessians_at_once(width(alike[0])) if alike[0].routed else len(alike)
        yield from in_turn(alike, size)


def hessians_at_once(k: int) -> int:
    """The number of experts of K input channels whose Hessians are held at once."""
    return max(1, MOST_HESSIAN_BYTES // (4 * k * k))


def problem_bytes(n: int, k: int) -> int:
    """Bytes of a problem ``[n, k]`` besides its weight and Hessian.

    They are those of the damped Hessian and the feedback, and of the target, errors, codes and what
    a sweep holds.
    """
    return 2 * 4 * k * k + 18 * n * k


def problems_at_once(n: int, k: int) -> int:
    """The number of problems ``[n, k]`` that are solved at once."""
    return max(1, MOST_PROBLEM_BYTES // problem_bytes(n, k))


def others_bytes(count: int, n: int, k: int) -> int:
    """Bytes that ``count`` problems hold beyond one that is solved.

    They are the codes of all, the Hessians held at once, and the problems solved with that one.
    """
    held = min(count, hessians_at_once(k))
    solved = (min(held, problems_at_once(n, k)) - 1) * problem_bytes(n, k)
    return (count - 1) * n * k + (held - 1) * 4 * k * k + solved


def kept_input_bytes(family: Family, shapes: Mapping[str, tuple[int, ...]], tokens: int) -> int:
    """Bytes of the float block's inputs; 0 if more than :data:`MOST_INPUT_BYTES`: none are kept.

    They are the inputs ``[tokens, K]`` of linears of ``shapes (N, K)``, and the residual stream
    ``[tokens, N]`` before each linear that writes to it.
    """
    dense = [group for group in family.groups if not group.routed]
    widths = (shapes[g.linears[0]][1] + g.writes_residual * shapes[g.linears[0]][0] for g in dense)
    nbytes = 4 * tokens * sum(widths)
    return nbytes if nbytes <= MOST_INPUT_BYTES else 0
