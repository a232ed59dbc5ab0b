"""Adapts a built-in recipe to a model that cannot have all of it.

A recipe of the user's own is never changed: what it asks for and the family refuses is an error.
"""

from qtool.models import Family
from qtool.pipeline.units import bytes_text
from qtool.recipes import Recipe, Step

#: of a checkpoint that a head apart from the embedding may take more before ``best`` keeps the tie
HEAD_SHARE = 0.05


def for_family(recipe: Recipe, family: Family) -> Recipe:
    """``recipe`` without the methods ``family`` refuses, each noted in ``Recipe.adaptations``."""
    if not recipe.built_in:
        return recipe
    for step in recipe.transforms:
        if step.name in family.refuses:
            rest = tuple(other for other in recipe.transforms if other != step)
            reason = family.refuses[step.name]
            recipe = recipe.adapted(f"{step.name} left out: {reason}", transforms=rest)
    if _rotates(recipe) and family.why_fixed:
        change = f"{_change(recipe)}: {family.why_fixed}"
        recipe = recipe.adapted(change, transforms=_unrotated(recipe))
    return recipe


def for_tied_head(recipe: Recipe, family: Family, head_bytes: int, untied_bytes: int) -> Recipe:
    """``recipe``, which stores embedding and head apart, on a model that ties the two.

    One orthogonal Q serves both only where the final norm has equal weights in all channels that
    it mixes: the head reads ``n diag(w)``, and ``Q^T diag(w) Q`` is no norm's weight. So ``best``
    leaves the residual stream alone, and with it the tie, where the head takes more than
    :data:`HEAD_SHARE` of the checkpoint or serving stacks know no head of its own. Any other
    recipe is as it was, and says what the head takes.

    Args:
        head_bytes: of the head.
        untied_bytes: of the checkpoint with it.
    """
    tied_bytes = untied_bytes - head_bytes
    more = f"{bytes_text(head_bytes)} ({head_bytes / tied_bytes:.0%}) more"
    too_much = family.always_tied or head_bytes > HEAD_SHARE * tied_bytes
    if recipe.variant != "best" or not too_much:
        return recipe.adapted(
            f"the tied head is stored apart from the embedding, {more}: the transforms change the "
            "two differently"
        )
    what = _change(recipe) if _rotates(recipe) else "norm-fusion: the final norm left out"
    reason = f"the tied head would have to be stored apart from the embedding, {more}"
    return recipe.adapted(f"{what}: {reason}", transforms=_unrotated(recipe, keep_final=True))


def _rotates(recipe: Recipe) -> bool:
    """Whether ``recipe`` rotates the residual stream."""
    step = recipe.step("rotate")
    return step is not None and bool(step.options.get("residual", True))


def _rotates_heads(step: Step) -> bool:
    return bool(step.options.get("heads", True))


def _change(recipe: Recipe) -> str:
    """What :func:`_unrotated` does to a recipe that rotates the residual stream."""
    step = recipe.step("rotate")
    assert step is not None
    heads = ": the residual stream left out, value heads alone are rotated"
    rest = heads if _rotates_heads(step) else " left out"
    return f"rotate{rest} and smooth takes the inputs behind norms"


def _unrotated(recipe: Recipe, *, keep_final: bool = False) -> tuple[Step, ...]:
    """The transforms of ``recipe`` where the residual stream keeps its outlier channels.

    Args:
        keep_final: the final norm keeps its weight, so that the head stays the embedding.
    """
    steps = []
    for step in recipe.transforms:
        options = dict(step.options)
        if step.name == "rotate":
            if not _rotates_heads(step):
                continue
            options["residual"] = False
        if step.name == "smooth":
            options.pop("groups", None)
        if step.name == "norm-fusion" and keep_final:
            options["final"] = False
        steps.append(Step(step.name, options))
    return tuple(steps)
