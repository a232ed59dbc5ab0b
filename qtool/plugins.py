"""Tables that other packages may add to.

The tables are those of schemes, layouts, kernels, recipes, families, methods and export formats. A
package adds to them by an entry point in its ``pyproject.toml``::

    [project.entry-points."qtool.plugins"]
    own-scheme = "own_scheme:register"

``own_scheme.register()`` then calls :func:`qtool.register_scheme` and similar functions. Entry
points are loaded once, when anything is first looked up by name, so that a list of a whole table
(the formats that take a model, the kernels of a scheme) has their entries too.
"""

import contextlib
import importlib
import json
import re
import reprlib
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from inspect import formatannotation, getmembers
from os import PathLike
from pathlib import Path
from traceback import extract_tb, walk_tb
from types import SimpleNamespace, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from qtool.errors import (
    CheckFailed,
    QtoolError,
    described,
    in_one_line,
    require_text,
    suggest,
)

GROUP = "qtool.plugins"
T = TypeVar("T")
#: names become parts of commands and of directories' names
NAME = re.compile(r"\w[\w.+-]*")

_loaded = False
_called: set[EntryPoint] = set()


class _CannotLoad(QtoolError):
    """A plugin failed; the message names it."""


def load() -> None:
    """Call all installed entry points of the group ``qtool.plugins``, once per process.

    Raises:
        QtoolError: naming the entry point that failed, and the line.
    """
    global _loaded
    if not _loaded:
        _loaded = True  # before the first call, which may look names up
        _call_others()


def _call_others() -> None:
    """Call the entry points that were not called yet."""
    global _loaded
    for entry in entry_points(group=GROUP):
        if entry in _called:
            continue
        _called.add(entry)
        try:
            entry.load()()
        except (Exception, SystemExit) as error:  # another package's code
            _loaded = False
            _called.remove(entry)
            if isinstance(error, _CannotLoad):  # another plugin, which this one waits for
                raise
            raise _CannotLoad(
                f"the plugin {entry.name!r} ({entry.value}) cannot be loaded:"
                f" {type(error).__name__}: {error}{_place(error)}"
            ) from error


def _place(error: BaseException) -> str:
    """The line where ``error`` left the code of others, in brackets."""
    loader = str(Path(importlib.__file__).parent), "<frozen importlib"
    own = str(Path(__file__).parent), contextlib.__file__, *loader
    frames = [f for f in extract_tb(error.__traceback__) if not f.filename.startswith(own)]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def raised_in(error: BaseException) -> QtoolError | None:
    """A sentence that names the plugin in whose code ``error`` was raised; None for qtool's own."""
    owners = {entry.value.split(":")[0].split(".")[0]: entry for entry in entry_points(group=GROUP)}
    for frame, line in reversed(list(walk_tb(error.__traceback__))):
        if entry := owners.get(frame.f_globals.get("__name__", "").split(".")[0]):
            code = frame.f_code
            found = QtoolError(
                f"the plugin {entry.name!r} fails in {code.co_qualname} ({code.co_filename}, line"
                f" {line}): {type(error).__name__}: {in_one_line(error)}"
            )
            found.__cause__ = error
            return found
    return None


def versions() -> dict[str, str]:
    """The versions of the packages that have plugins, by name."""
    packages = (entry.dist for entry in entry_points(group=GROUP))
    return {package.name: package.version for package in packages if package}


def made_with(config: Mapping[str, Any]) -> str:
    """The packages that ``quantization_config`` names, in brackets; empty if it names none.

    A message on what is not registered ends with them.

    Raises:
        QtoolError: they are no mapping.
    """
    found = config.get("plugins", {})
    if not isinstance(found, Mapping):
        raise QtoolError(f"quantization_config is damaged: plugins is {found!r}")
    packages = ", ".join(f"{name} {version}" for name, version in found.items())
    return f" (plugins where it was made: {packages})" if packages else ""


def find(table: MutableMapping[str, T], name: str, kind: str) -> T:
    """The entry ``name`` of ``table``, built in or from a plugin.

    A plugin that is being called gets what others add, in whatever order they are called.

    Raises:
        QtoolError: an unknown ``kind`` (``scheme``, ``layout``, ...), with a suggestion.
    """
    load()
    if require_text(kind, name) not in table:
        _call_others()
    if name not in table:
        raise QtoolError(f"unknown {kind} {name!r}: {suggest(name, table)}")
    return table[name]


def add(table: MutableMapping[str, T], name: str, entry: T, kind: str) -> None:
    """Put ``entry`` into ``table``; it replaces an entry that the same lines made before.

    Raises:
        QtoolError: as :func:`require_free`.
    """
    require_free(table, name, entry, kind)
    table[name] = entry


def require_free(table: MutableMapping[str, T], name: str, entry: T, kind: str) -> None:
    """Check that ``table`` can have ``entry`` as ``name``.

    Raises:
        QtoolError: the name is taken by another entry, or is no text.
    """
    if not isinstance(name, str) or not name:
        raise QtoolError(f"a {kind} to register has the name {name!r}; a text is expected")
    if not NAME.fullmatch(name):
        raise QtoolError(
            f"a {kind} to register has the name {name!r}; letters, digits, _, +, - and . are"
            " expected"
        )
    if name in table and not same(table[name], entry):
        raise QtoolError(
            f"the {kind} {name!r} is registered already{_origin(table[name])}; choose another name"
        )


def _origin(entry: object) -> str:
    """The module that ``entry`` comes from, if it is a class or of a class of another package."""
    kind = entry if isinstance(entry, type) else type(entry)
    of_another = not kind.__module__.startswith(("qtool.", "builtins"))
    return f", by {kind.__module__}" if entry is kind or of_another else ""


def same(there: Any, entry: Any) -> bool:
    """Whether two entries were made by the same lines, run twice.

    They were if they are classes of one module and name, or objects that are equal or of such
    classes and have equal contents, functions by their module and name.
    """
    return bool(there == entry) or _made_of(there) == _made_of(entry)


def _made_of(value: Any, *, whole: bool = True) -> Any:
    """What stays the same in ``value`` if its lines run again.

    An object within it counts as itself, unless it is a dataclass or ``whole``.
    """
    if hasattr(value, "__qualname__"):  # a class or a function
        return value.__module__, value.__qualname__
    if isinstance(value, dict):
        return {key: _made_of(held, whole=False) for key, held in value.items()}
    if isinstance(value, tuple | list):
        return [_made_of(held, whole=False) for held in value]
    if hasattr(value, "__dict__") and (whole or is_dataclass(value)):
        return _made_of(type(value)), _made_of(vars(value), whole=False)
    return value


def require_kinds(given: Any, name: str, kinds: Mapping[str, Any]) -> None:
    """Refuse ``given``, which users call ``name``, if an attribute is not of its declared type.

    Args:
        kinds: annotations by attribute, as ``typing.get_type_hints`` has them.

    Raises:
        QtoolError: naming the attribute, its value and its type.
    """
    for attribute, kind in kinds.items():
        if not is_of(value := getattr(given, attribute), kind):
            raise QtoolError(
                f"{name}: {attribute} is {reprlib.repr(value)}; {_in_words(kind)} is expected"
            )


def require_keywords(options: Mapping[str, Any], declared: type) -> None:
    """Refuse keywords that ``declared``, a TypedDict or a dataclass, lacks or has of another type.

    Raises:
        QtoolError: naming the keyword, with a suggestion, or its value and its type.
    """
    kinds = get_type_hints(declared)
    for name in options:
        if name not in kinds:
            raise QtoolError(f"unknown option {name!r}: {suggest(name, kinds)}")
    given = SimpleNamespace(**options)
    require_kinds(given, "options", {name: kinds[name] for name in options})


def properties(base: type) -> dict[str, Any]:
    """The types of the properties that the class ``base`` declares, by name."""
    found = getmembers(base, lambda member: isinstance(member, property))
    return {name: get_type_hints(member.fget)["return"] for name, member in found}


def is_of(value: Any, kind: Any) -> bool:
    """Whether ``value``, with all that it contains, is of the type that the annotation says."""
    origin: Any = get_origin(kind) or kind
    of = get_args(kind)
    if origin in (Union, UnionType):
        return any(is_of(value, one) for one in of)
    if origin is Any or origin is Callable:
        return origin is Any or callable(value)
    if isinstance(value, bool | str):  # no whole number, and no sequence of names
        return origin is type(value)
    among: Any = (int, float) if origin is float else origin
    if not isinstance(value, among):
        return False
    if not of or isinstance(value, PathLike):
        return True
    if isinstance(value, Mapping):
        return all(is_of(key, of[0]) and is_of(one, of[1]) for key, one in value.items())
    if origin is tuple and ... not in of:
        return len(value) == len(of) and all(map(is_of, value, of))
    return all(is_of(one, of[0]) for one in value)


def _in_words(kind: Any) -> str:
    """The annotation ``kind`` without the names of modules."""
    return re.sub(r"\b(\w+\.)+", "", formatannotation(kind))


def require_json(given: Any, what: str) -> None:
    """Refuse ``given``, which users call ``what``, if strict JSON, without NaN, cannot hold it.

    Raises:
        QtoolError: naming what JSON does not hold.
    """
    try:
        json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise QtoolError(f"{what} cannot be written as JSON: {error}") from error


def require_returned(
    given: Any, function: str, found: T, kind: Any, of: str = "", shape: Sequence[int] | None = None
) -> T:
    """Return ``found``, after a check that it is what ``function`` of ``given`` should return.

    Args:
        given: a method, scheme or family of a plugin; messages call it by its ``name``.
        kind: the expected type, an annotation.
        of: what ``found`` is for, as a message has it behind the type that was found.
        shape: the expected shape of a tensor; None: any.

    Raises:
        QtoolError: ``found`` is of another type or shape.
    """
    has: Any = getattr(found, "shape", None)
    if not is_of(found, kind) or (shape is not None and tuple(has) != tuple(shape)):
        expected = _in_words(kind) + ("" if shape is None else f" {list(shape)}")
        raise QtoolError(
            f"{given.name}: {function} gives {described(found)}{of}; {expected} is expected"
        )
    return found


def require_like(function: str, found: object, expected: object) -> None:
    """Check that ``found``, which ``function`` gives, has the dtype and shape of ``expected``.

    Raises:
        CheckFailed: it has others, or is no tensor.
    """
    if (given := described(found)) != (like := described(expected)):
        raise CheckFailed(f"{function} gives {given}; {like} is expected")
