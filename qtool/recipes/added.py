"""Recipes that other packages bring with their schemes."""

from collections.abc import Mapping
from typing import Any

from qtool import plugins

#: content of a recipe file, by the scheme's name
ADDED: dict[str, Mapping[str, Any]] = {}


def find(scheme: str) -> Mapping[str, Any] | None:
    """The recipe that a plugin registered for ``scheme``; None if none did."""
    if scheme not in ADDED:
        plugins.load()
    return ADDED.get(scheme)


def everything() -> Mapping[str, Mapping[str, Any]]:
    """All recipes of all plugins."""
    plugins.load()
    return ADDED
