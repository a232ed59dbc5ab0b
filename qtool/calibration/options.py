"""Checks that a recipe's options are of the types that a method's dataclass declares."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from qtool.calibration.method import Method
from qtool.errors import QtoolError, suggest


def check_options(method: type[Method], options: Mapping[str, Any]) -> None:
    """Refuse options that ``method`` does not have, and values of another type than declared.

    Raises:
        QtoolError: naming the option, its value and what would be accepted.
    """
    kinds = {field.name: field.type for field in fields(method)}
    for option, value in options.items():
        if option not in kinds:
            raise QtoolError(f"{method.name}: unknown option {option!r}; {suggest(option, kinds)}")
        positive = option in method.positive
        if not _is(kinds[option], value) or (positive and value == 0):
            expected = _in_words(kinds[option], "above 0" if positive else "of 0 or more")
            raise QtoolError(f"{method.name}: {option} is {value!r}; expected {expected}")


def _is(kind: Any, value: Any) -> bool:
    """Whether ``value`` is of ``kind``; no number may be negative."""
    if isinstance(kind, UnionType):
        return any(_is(one, value) for one in get_args(kind))
    if get_origin(kind) is Sequence:
        return isinstance(value, list | tuple) and all(_is(get_args(kind)[0], one) for one in value)
    if kind in (int, float) and not isinstance(value, bool):
        return isinstance(value, int | kind) and 0 <= value < math.inf
    return type(value) is kind


def _in_words(kind: Any, bound: str) -> str:
    """``kind`` in words; numbers are within ``bound``."""
    if isinstance(kind, UnionType):
        return " or ".join(_in_words(one, bound) for one in get_args(kind))
    if get_origin(kind) is Sequence:
        return "a list"
    # YAML takes 1e-2 for a text
    numbers = {int: f"a whole number {bound}", float: f"a number {bound} (as 0.01 or 1.0e-2)"}
    return numbers.get(kind) or {bool: "true or false", NoneType: "null"}.get(kind, "a text")
