"""Leaves a few linears in 16 bits if a built-in recipe's groups do not divide their inputs.

Some models have narrow linears besides attention and MLP (low-rank branches, per-layer embeddings).
If more than a few linears do not fit, it is an error: another group size is another quantization,
which a user chooses.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from qtool.pipeline.recipe_fit.part_names import role_name, role_pattern, roles_match
from qtool.recipes import LayerRule, Recipe

#: largest share of the linears' weights that may stay in 16 bits
FEW = 1 / 16


def for_groups(recipe: Recipe, shapes: Mapping[str, tuple[int, ...]]) -> Recipe:
    """``recipe`` with a rule for the linears whose inputs its groups do not divide.

    ``Recipe.adaptations`` names them.

    Args:
        shapes: ``(N, K)`` of the linears of one block of each kind, by full name.
    """
    misfits = {
        name: (rule.group_size, shape[1])
        for name, shape in shapes.items()
        if (rule := recipe.rule_of(name)) and rule.scheme
        if rule.group_size and shape[1] % rule.group_size
    }
    weights = sum(prod(shapes[name]) for name in misfits)
    if not misfits or weights > FEW * sum(map(prod, shapes.values())):
        return recipe
    roles = {role_pattern(name): found for name, found in misfits.items()}
    kept = LayerRule(roles_match(roles), None)
    sentences = (
        f"in 16 bits: {role_name(role)}, {k} inputs, which groups of {size} do not divide"
        for role, (size, k) in roles.items()
    )
    adaptations = (*recipe.adaptations, *sentences)
    return replace(recipe, layers=(kept, *recipe.layers), adaptations=adaptations)
