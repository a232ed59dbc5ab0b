"""Tables that other packages may add to, and parts of qtool that may be absent.

The tables are those of schemes, layouts, kernels, recipes, families, methods and export formats. A
package adds to them by an entry point in its ``pyproject.toml``::

    [project.entry-points."qtool.plugins"]
    own-scheme = "own_scheme:register"

``own_scheme.register()`` then calls :func:`qtool.register_scheme` and its like. Entry points are
loaded once, the first time that anything is looked up by name, so that what lists a whole table
(the formats that take a model, the kernels of a scheme) lists theirs too.
"""

from collections.abc import Iterable, MutableMapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, TypeVar

from qtool.errors import QtoolError, require_text, suggest

GROUP = "qtool.plugins"
T = TypeVar("T")

_loaded = False


def load() -> None:
    """Call all installed entry points of the group ``qtool.plugins``, once a process.

    Raises:
        QtoolError: naming the entry point that failed.
    """
    global _loaded
    if _loaded:
        return
    _loaded = True  # before the first call: what it registers may look names up
    for entry in entry_points(group=GROUP):
        try:
            entry.load()()
        except Exception as error:  # another package's code
            _loaded = False
            raise QtoolError(
                f"the plugin {entry.name!r} ({entry.value}) cannot be loaded:"
                f" {type(error).__name__}: {error}"
            ) from error


def find(table: MutableMapping[str, T], name: str, kind: str) -> T:
    """The entry ``name`` of ``table``, built in or from a plugin.

    Raises:
        QtoolError: an unknown ``kind`` (``scheme``, ``layout``, ...), with a suggestion.
    """
    load()
    if require_text(kind, name) not in table:
        raise QtoolError(f"unknown {kind} {name!r}: {suggest(name, table)}")
    return table[name]


def add(table: MutableMapping[str, T], name: str, entry: T, kind: str) -> None:
    """Put ``entry`` into ``table``; adding the same one again changes nothing.

    Raises:
        QtoolError: the name is taken by another entry, or is no text.
    """
    if not isinstance(name, str) or not name:
        raise QtoolError(f"a {kind} to register has the name {name!r}; a text is expected")
    if name in table and table[name] != entry:
        raise QtoolError(f"the {kind} {name!r} is registered already; choose another name")
    table[name] = entry


def require_attributes(given: Any, name: str, attributes: Iterable[str]) -> None:
    """Refuse ``given``, which users call ``name``, where it lacks one of ``attributes``.

    Raises:
        QtoolError: naming those that it lacks.
    """
    if missing := [attribute for attribute in attributes if not hasattr(given, attribute)]:
        raise QtoolError(f"{name} has no {', '.join(missing)}")


def optional(module: str, name: str, purpose: str) -> Any:
    """``name`` of a module that an installation may lack.

    Raises:
        QtoolError: it lacks it, so ``purpose`` (a command) cannot be had.
    """
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise QtoolError(f"{purpose} is not part of this installation: {error}") from error
