"""Numbers as text: byte counts and durations for people, and whole numbers that they give."""

import re


def whole_number(text: str) -> int | None:
    """The number that ``text`` has in ASCII digits, at most 18; None for any other text.

    >>> whole_number("32"), whole_number("3²"), whole_number("٣"), whole_number("-3")
    (32, None, None, None)
    """
    return int(text) if re.fullmatch("[0-9]{1,18}", text) else None


def bytes_text(nbytes: float) -> str:
    """A byte count with three digits: ``1.03 GB``, ``15.2 MB``, ``640 kB``."""
    for size, unit in ((1e9, "GB"), (1e6, "MB")):
        if nbytes >= 0.9995 * size:
            value = nbytes / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{nbytes / 1e3:.0f} kB"


def times(before: float, after: float) -> str:
    """A text that compares ``after`` with ``before``: ``2.02 times smaller``, or ``larger``."""
    word = "smaller" if after <= before else "larger"
    return f"{max(before, after) / min(before, after):.2f} times {word}"


def group_size_text(group_size: int | None) -> str:
    """A group size as text: the number, or ``channel`` for None, the whole channel."""
    return "channel" if group_size is None else str(group_size)


def duration(seconds: float) -> str:
    """A duration as text: ``0.4 s``, ``95 s``, ``12 min``, ``3.5 h``."""
    if seconds < 120:
        return f"{seconds:.{0 if seconds >= 9.95 else 1}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
