"""How much GPTQ holds at once, by sizes alone: Hessians, problems, inputs of the float block.

Legend: N output channels, K input channels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from qtool.calibration.stacking import by_role
from qtool.models.family import Family
from qtool.models.parts import LinearGroup

#: bytes of problems that are solved together: as many as that holds, one in any case
MOST_PROBLEM_BYTES = 2 << 30
#: bytes of experts' Hessians that are held at once, likewise
MOST_HESSIAN_BYTES = 16 << 30
#: bytes of the float block's inputs that are kept, so that one forward is enough for all of them
MOST_INPUT_BYTES = 256 << 20


def hessians_in_turn(
    groups: Sequence[LinearGroup], width: Callable[[LinearGroup], int]
) -> Iterator[list[LinearGroup]]:
    """The groups whose Hessians are held at once: those of a role, of experts as many as may be.

    ``width``: the input channels of a group.
    """
    for alike in by_role(groups):
        size = hessians_at_once(width(alike[0])) if alike[0].routed else len(alike)
        yield from (alike[start : start + size] for start in range(0, len(alike), size))


def hessians_at_once(k: int) -> int:
    """The number of experts of K input channels whose Hessians are held at once."""
    return max(1, MOST_HESSIAN_BYTES // (4 * k * k))


def problem_bytes(n: int, k: int) -> int:
    """Bytes of a problem ``[n, k]`` beside its weight and Hessian.

    The damped Hessian and the feedback; target, errors, codes and what a sweep holds.
    """
    return 2 * 4 * k * k + 18 * n * k


def problems_at_once(n: int, k: int) -> int:
    """The number of problems ``[n, k]`` that are solved at once."""
    return max(1, MOST_PROBLEM_BYTES // problem_bytes(n, k))


def others_bytes(count: int, n: int, k: int) -> int:
    """Bytes that ``count`` problems hold beyond one that is solved.

    Codes of all, Hessians of those that are held at once, and what is solved together with the one.
    """
    held = min(count, hessians_at_once(k))
    solved = (min(held, problems_at_once(n, k)) - 1) * problem_bytes(n, k)
    return (count - 1) * n * k + (held - 1) * 4 * k * k + solved


def kept_input_bytes(family: Family, shapes: Mapping[str, tuple[int, ...]], tokens: int) -> int:
    """Bytes of the float block's inputs that are kept; 0 where they are more than is meant to be.

    Inputs ``[tokens, K]`` of linears of ``shapes (N, K)``, and before each that writes to it the
    residual stream ``[tokens, N]``.
    """
    dense = [group for group in family.groups if not group.routed]
    widths = (shapes[g.linears[0]][1] + g.writes_residual * shapes[g.linears[0]][0] for g in dense)
    nbytes = 4 * tokens * sum(widths)
    return nbytes if nbytes <= MOST_INPUT_BYTES else 0
