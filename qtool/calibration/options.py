"""Checks that a recipe's options are of the types that a method's dataclass declares.

An option is a ``bool``, ``int``, ``float`` or ``str``, a ``Sequence`` of one of them, ``None``, or
a union of these, and has a default. Numbers are at least 0.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints

from qtool.calibration.method import Method
from qtool.errors import QtoolError, suggest
from qtool.plugins import is_of

#: the largest value of any number: the largest seed that torch takes
LARGEST_NUMBER = 2**63 - 1


def require_options(method: type[Method]) -> None:
    """Refuse a method whose dataclass declares options that no recipe could give.

    Raises:
        QtoolError: names the option and the reason.
    """
    kinds, named = _kinds(method), set(inspect.get_annotations(method))
    hints = get_type_hints(method)
    constants = {name for name, kind in hints.items() if ClassVar in (kind, get_origin(kind))}
    for option in sorted(named - constants - {field.name for field in fields(method)}):
        raise QtoolError(
            f"{method.__name__}.{option} is no option: {method.__name__} is no dataclass"
        )
    for bound in ("positive", "most"):
        for option in sorted({*getattr(method, bound)} - kinds.keys()):
            raise QtoolError(
                f"{method.__name__}: {bound} names the option {option!r}: {suggest(option, kinds)}"
            )
    for field in _options(method):
        if field.default is MISSING and field.default_factory is MISSING:
            raise QtoolError(f"{method.__name__}.{field.name} has no default, which options have")
        if not _is_known(kinds[field.name]):
            raise QtoolError(
                f"{method.__name__}.{field.name} is a {kinds[field.name]}; an option is a bool,"
                " int, float or str, a Sequence of one of them, None, or a union of these"
            )


def _options(method: type[Method]) -> list[Field[Any]]:
    """The dataclass fields that are options; a method may have others for what it learns."""
    return [field for field in fields(method) if field.init]


def _kinds(method: type[Method]) -> dict[str, Any]:
    """The types of the options, also if annotations are strings."""
    try:
        kinds = get_type_hints(method)
    except NameError as error:
        raise QtoolError(f"{method.__name__}: the types of its options: {error}") from error
    return {field.name: kinds[field.name] for field in _options(method)}


def _is_known(kind: Any) -> bool:
    if get_origin(kind) in (UnionType, Union, Sequence):
        return all(map(_is_known, get_args(kind)))
    return kind in (bool, int, float, str, NoneType)


def check_options(method: type[Method], options: Mapping[str, Any]) -> None:
    """Refuse options that ``method`` does not have, and values of another type than declared.

    Raises:
        QtoolError: names the option, its value and the values that are accepted.
    """
    kinds = _kinds(method)
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
    numbers = value if isinstance(value, list | tuple) else [value]
    within = (0 <= one <= min(most, LARGEST_NUMBER) for one in numbers if type(one) in (int, float))
    return is_of(value, kind) and all(within)


def _in_words(kind: Any, bound: str) -> str:
    """``kind`` in words; numbers are within ``bound``."""
    if get_origin(kind) in (UnionType, Union):
        return " or ".join(_in_words(one, bound) for one in get_args(kind))
    if get_origin(kind) is Sequence:
        return f"a list, each of it {_in_words(get_args(kind)[0], bound)}"
    # YAML reads 1e-2 as a text
    numbers = {
        int: f"a whole number {bound}, with at most 63 bits",
        float: f"a number {bound} (as 0.01 or 1.0e-2)",
    }
    return numbers.get(kind) or {bool: "true or false", NoneType: "null"}.get(kind, "a text")
