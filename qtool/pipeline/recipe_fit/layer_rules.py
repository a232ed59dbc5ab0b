"""Checks that a user's layer rules and roles match linears; names linears that no rule matches.

Otherwise a misspelt role would silently leave its layers in 16 bits.
"""

import re
from collections.abc import Sequence

from qtool.errors import QtoolError, suggest
from qtool.recipes import Recipe


def with_unmatched(recipe: Recipe, names: Sequence[str]) -> Recipe:
    """``recipe``; ``Recipe.adaptations`` says which linears of ``names`` no rule matches."""
    left = [name for name in names if recipe.rule_of(name) is None]
    if not left:
        return recipe
    which = f"{left[0]} and {len(left) - 1} more match" if left[1:] else f"{left[0]} matches"
    return recipe.adapted(
        f"in 16 bits: {which} no layer rule of {recipe.scheme}; a last rule match: '.*' takes all "
        "that is left"
    )


def require_matches(recipe: Recipe, names: Sequence[str]) -> None:
    """Check that each rule of ``recipe`` is the first to match one of the linears ``names``.

    Raises:
        QtoolError: names a rule that matches no linear, or only linears that earlier rules match,
            or a role that no linear has.
    """
    rules = [re.compile(rule.match) for rule in recipe.layers]
    hold = {next((i for i, rule in enumerate(rules) if rule.search(name)), None) for name in names}
    roles = dict.fromkeys(name.rpartition(".")[2] for name in names)
    for number, rule in enumerate(rules):
        if number in hold:
            continue
        which = f"layer rule {number + 1} ({recipe.layers[number]})"
        if any(map(rule.search, names)):
            raise QtoolError(
                f"{recipe.scheme}: {which} never holds: earlier rules match every linear that it "
                "does; put it before them or leave it out"
            )
        raise QtoolError(
            f"{recipe.scheme}: {which} matches no linear of the model; what may be quantized is "
            f"called like {names[0]}, with the roles {', '.join(roles)}; "
            "embedding and head stay in 16 bits"
        )
    for number, layer in enumerate(recipe.layers, 1):
        for role in layer.roles:
            if not any(name.endswith(f".{role}") for name in names):
                raise QtoolError(
                    f"{recipe.scheme}: layer rule {number} ({layer}): no linear that may be "
                    f"quantized is called {role}; {suggest(role, roles)}"
                )
