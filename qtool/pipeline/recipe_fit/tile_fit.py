"""Chooses row-major where a built-in recipe's layout does not fit a weight.

The numbers are the same; there is no kernel for them.

Tiny models have linears of 32 rows, Falcon-like ones fused rows of any number. A layout that was
chosen by name (``--layout``, a recipe of the user's own) is never exchanged: there a misfit is
an error. Group sizes are :mod:`.group_fit`'s.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from qtool import layouts, recipes
from qtool.errors import QtoolError
from qtool.layouts.row_major import BY_BITS
from qtool.recipes import LayerRule, Recipe


def for_shapes(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> Recipe:
    """``recipe`` with a row-major rule before each rule whose layout does not fit all its linears.

    ``Recipe.adaptations`` gets a sentence for each.

    Args:
        shapes: ``(N, K)`` of the linears of a model, by full name.
    """
    if not recipe.built_in or not any(rule.layout for rule in recipe.layers):
        return recipe
    own = {rule.layout for rule in recipes.load(recipe.scheme, recipe.variant).layers}
    misfits: dict[LayerRule, dict[str, None]] = {}
    for name, shape in shapes.items():
        rule = recipe.rule_of(name)
        if rule and rule.scheme and rule.layout in own and not _fits(rule, *shape):
            misfits.setdefault(rule, {})[role_pattern(name)] = None
    if not misfits:
        return recipe
    rules, sentences = [], []
    for rule in recipe.layers:
        if roles := misfits.get(rule):
            bits = layouts.get(str(rule.layout)).bits
            rules.append(replace(rule, match=f"({'|'.join(roles)})$", layout=BY_BITS[bits].name))
            listed = ", ".join(role.replace("\\", "").replace("d+", "*") for role in roles)
            sentences.append(
                f"layout {BY_BITS[bits].name} for {listed}: "
                f"{rule.layout}'s tile does not divide their weights"
            )
        rules.append(rule)
    return replace(recipe, layers=tuple(rules), adaptations=(*recipe.adaptations, *sentences))


def _fits(rule: LayerRule, n: int, k: int) -> bool:
    """Whether the layout takes ``[n, k]``, or no row-major one could; group sizes do not matter."""
    if rule.layout is None or (rule.group_size and k % rule.group_size):
        return True
    if (layout := layouts.get(rule.layout)).bits not in BY_BITS:
        return True
    try:
        layout.require(n, k)
    except QtoolError:
        return False
    return True


def role_pattern(name: str) -> str:
    """A pattern for the linears like ``name``: its name within the block, any expert."""
    parts = name.split(".")
    block = next(index for index, part in enumerate(parts) if part.isdigit())
    return r"\.".join(r"\d+" if part.isdigit() else re.escape(part) for part in parts[block + 1 :])
