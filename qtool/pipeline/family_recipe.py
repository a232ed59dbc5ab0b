"""A built-in recipe on a family that cannot have all of it: the rest of it runs, and what was left
out is said.

A recipe of the user's own is never changed: what it asks for and the family refuses is an error.
"""

from dataclasses import replace

from qtool.models import Family
from qtool.recipes import VARIANTS, Recipe, Step


def for_family(recipe: Recipe, family: Family) -> Recipe:
    """``recipe`` without what ``family`` refuses, each omission in ``Recipe.left_out``; a user's
    own as it is.
    """
    if recipe.variant not in VARIANTS:
        return recipe
    left_out = [
        f"{s.name} left out: {family.refuses[s.name]}"
        for s in recipe.transforms
        if s.name in family.refuses
    ]
    steps = [step for step in recipe.transforms if step.name not in family.refuses]
    rotates = any(step.name == "rotate" and step.options.get("residual", True) for step in steps)
    if rotates and family.post_norms:
        left_out.append(
            f"rotate: the residual stream left out, value heads alone are rotated: {family.post_norms[0]} acts on what "
            "is written to it; smooth takes the inputs behind norms instead"
        )
        steps = [_unrotated(step) for step in steps]
    return replace(recipe, transforms=tuple(steps), left_out=tuple(left_out))


def _unrotated(step: Step) -> Step:
    """``step`` where the residual stream keeps its outlier channels."""
    if step.name == "rotate":
        return Step(step.name, {**step.options, "residual": False})
    if step.name == "smooth":
        return Step(
            step.name, {name: value for name, value in step.options.items() if name != "groups"}
        )
    return step
