"""Checks that a recipe's options are of the types that a method's dataclass declares."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from qtool.calibration.method import Method
from qtool.errors import QtoolError, suggest

#: of any number: what torch takes for a seed
LARGEST = 2**63 - 1


def check_options(method: type[Method], options: Mapping[str, Any]) -> None:
    """Refuse options that ``method`` does not have, and values of another type than declared.

    Raises:
        QtoolError: naming the option, its value and what would be accepted.
    """
    kinds = {field.name: field.type for field in fields(method)}
    for option, value in options.items():
        if option not in kinds:
            raise QtoolError(f"{method.name}: unknown option {option!r}; {suggest(option, kinds)}")
        positive, most = option in method.positive, method.most.get(option, math.inf)
        if not _is(kinds[option], value, most) or (positive and value == 0):
            bound = "above 0" if positive else "of 0 or more"
            bound += f", at most {most}" if option in method.most else ""
            expected = _in_words(kinds[option], bound)
            raise QtoolError(f"{method.name}: {option} is {value!r}; expected {expected}")


def _is(kind: Any, value: Any, most: float) -> bool:
    """Whether ``value`` is of ``kind``; no number may be negative, or above ``most``."""
    if isinstance(kind, UnionType):
        return any(_is(one, value, most) for one in get_args(kind))
    if get_origin(kind) is Sequence:
        of = get_args(kind)[0]
        return isinstance(value, list | tuple) and all(_is(of, one, most) for one in value)
    if kind in (int, float) and not isinstance(value, bool):
        most = min(most, LARGEST)
        return isinstance(value, int | kind) and 0 <= value <= most
    return type(value) is kind


def _in_words(kind: Any, bound: str) -> str:
    """``kind`` in words; numbers are within ``bound``."""
    if isinstance(kind, UnionType):
        return " or ".join(_in_words(one, bound) for one in get_args(kind))
    if get_origin(kind) is Sequence:
        return f"a list, each of it {_in_words(get_args(kind)[0], bound)}"
    # YAML takes 1e-2 for a text
    numbers = {
        int: f"a whole number {bound}, with at most 63 bits",
        float: f"a number {bound} (as 0.01 or 1.0e-2)",
    }
    return numbers.get(kind) or {bool: "true or false", NoneType: "null"}.get(kind, "a text")
