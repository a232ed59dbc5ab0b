"""Finds the linears of a model that a built-in rule means: other families have other names.

Built-in rules name Llama's linears: ``down_proj`` stands for the linears of every family that read
what an MLP or an expert made, ``v_proj`` for the ones that make the values. The rules that are
added to a recipe match linears by :func:`role_pattern`.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace

from qtool.models import Family
from qtool.models.parts import Fold
from qtool.recipes import LayerRule, Recipe
from qtool.units import whole_number


def for_names(recipe: Recipe, kinds: Collection[Family]) -> Recipe:
    """``recipe`` with rules that also match what the families ``kinds`` of blocks call a part."""
    names = {
        role: list(dict.fromkeys(name for family in kinds for name in of_family(family)))
        for role, of_family in (("v_proj", _values), ("down_proj", _downs))
    }

    def fitted(rule: LayerRule) -> LayerRule:
        meant = (name for role in rule.roles for name in names.get(role, ()))
        others = [name for name in meant if not re.search(rule.match, f".{name}")]
        patterns = dict.fromkeys(role_pattern(f"0.{name}") for name in others)
        return replace(rule, match=f"{rule.match}|{roles_match(patterns)}") if patterns else rule

    return replace(recipe, layers=tuple(map(fitted, recipe.layers)))


def _values(family: Family) -> Iterator[str]:
    """The linear that makes the values, whole if it makes more."""
    if family.attention is not None:
        yield from {family.owner(family.attention.v)} & set(family.linears())


def _downs(family: Family) -> Iterator[str]:
    for group in family.groups:
        if group.fold in (Fold.PRODUCT, Fold.ACTIVATION):
            yield from group.linears


def roles_match(patterns: Iterable[str]) -> str:
    """A rule's ``match`` for all linears with these patterns of :func:`role_pattern`.

    A name within a block comes after a number: BERT's ``attention.output.dense`` is no
    ``output.dense``.
    """
    return rf"\.\d+\.({'|'.join(patterns)})$"


def role_pattern(name: str) -> str:
    """A regex for linears like ``name``: its name within the block, with any expert's number."""
    parts = name.split(".")
    block = next(index for index, part in enumerate(parts) if whole_number(part) is not None)
    return r"\.".join(
        re.escape(part) if whole_number(part) is None else r"\d+" for part in parts[block + 1 :]
    )


def role_name(pattern: str) -> str:
    """A :func:`role_pattern` for people, with ``*`` for any expert's number."""
    return pattern.replace(r"\d+", "*").replace("\\", "")
