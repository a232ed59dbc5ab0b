"""Renames tensors and modules by their own names or by those of the modules around them."""

from collections.abc import Collection, Mapping


def renamed(name: str, names: Mapping[str, str]) -> str:
    """``name`` with its own or its nearest module's name replaced, if that is in ``names``."""
    parts = name.split(".")
    prefixes = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    prefix = next((p for p in prefixes if p in names), None)
    return name if prefix is None else names[prefix] + name[len(prefix) :]


def by_module(names: Mapping[str, str], kept: Collection[str]) -> dict[str, str]:
    """As few pairs as :func:`renamed` needs to give ``names``; it then leaves ``kept`` alone.

    >>> by_module({"model.tower.0.bias": "tower.old.0.bias", "head.weight": "lm.head.weight"}, [])
    {'model.tower': 'tower.old', 'head': 'lm.head'}
    >>> by_module({"tower.0.bias": "old.0.bias"}, ["tower.1.bias"])
    {'tower.0.bias': 'old.0.bias'}
    """
    found = {}
    for name, other in names.items():
        ours, theirs = name.split("."), other.split(".")
        while len(ours) > 1 and len(theirs) > 1 and ours[-1] == theirs[-1]:
            ours, theirs = ours[:-1], theirs[:-1]
        found[".".join(ours)] = ".".join(theirs)
    wanted = {name: name for name in kept} | dict(names)
    if all(renamed(name, found) == other for name, other in wanted.items()):
        return found
    return dict(names)
