"""Chooses row-major if a layout of a built-in recipe or of ``--target`` does not fit a weight.

The quantized weights are the same, but no kernel runs them.

Tiny models have linears of 32 rows, and Falcon-like models fused linears of any number of rows. A
layout that the user chose by name (``--layout``, a recipe file) is never replaced: a weight that
does not fit it is an error. :mod:`.group_fit` handles group sizes.
"""

from collections.abc import Mapping
from dataclasses import replace

from qtool import layouts
from qtool.errors import QtoolError
from qtool.layouts.row_major import BY_BITS
from qtool.pipeline.recipe_fit.part_names import role_name, role_pattern, roles_match
from qtool.recipes import LayerRule, Recipe


def for_shapes(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> Recipe:
    """``recipe`` with a row-major rule before each rule whose layout does not fit all its linears.

    ``Recipe.adaptations`` gets a sentence for each such rule.

    Args:
        shapes: ``(N, K)`` of the linears of one block of each kind, by full name.
    """
    if recipe.layout_is_named:
        return recipe
    misfits: dict[LayerRule, dict[str, None]] = {}
    for name, shape in shapes.items():
        rule = recipe.rule_of(name)
        if rule and rule.scheme and not _fits(rule, *shape):
            misfits.setdefault(rule, {})[role_pattern(name)] = None
    rules, sentences = [], []
    for rule in recipe.layers:
        if roles := misfits.get(rule):
            bits = layouts.get(str(rule.layout)).bits
            layout = BY_BITS[bits].name
            rules.append(replace(rule, match=roles_match(roles), roles=(), layout=layout))
            sentences.append(
                f"layout {layout} for {', '.join(map(role_name, roles))}: "
                f"{rule.layout}'s tile does not divide their weights"
            )
        rules.append(rule)
    return replace(recipe, layers=tuple(rules), adaptations=(*recipe.adaptations, *sentences))


def _fits(rule: LayerRule, n: int, k: int) -> bool:
    """Whether the layout takes ``[n, k]``; also True if row-major would not take it either."""
    if rule.layout is None or (rule.group_size and k % rule.group_size):
        return True
    if (layout := layouts.get(rule.layout)).bits not in BY_BITS:
        return True
    try:
        layout.require(n, k)
    except QtoolError:
        return False
    return True
