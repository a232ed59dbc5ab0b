"""Adapts a built-in recipe to a model that cannot have all of its methods.

A user's recipe is never changed; it is an error if it has a method that the family refuses.
"""

from qtool.models import Family
from qtool.recipes import Recipe, Step
from qtool.units import bytes_text

#: ``best`` unties the head only if it adds at most this share to the tied checkpoint
HEAD_SHARE = 0.05


def for_family(recipe: Recipe, family: Family) -> Recipe:
    """``recipe`` without methods that ``family`` refuses; ``Recipe.adaptations`` names them."""
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
    """``recipe``, which makes embedding and head differ, adapted to a model that ties the two.

    One orthogonal Q fits both only if the final norm has equal weights in all channels that Q
    mixes: the head reads ``n diag(w)``, and ``Q^T diag(w) Q`` is no norm's weight. So ``best``
    keeps the residual stream and the tied head unchanged if the head takes more than
    :data:`HEAD_SHARE` of the tied checkpoint, or if serving stacks know no separate head. Any other
    recipe is unchanged and notes the size of the head.

    Args:
        head_bytes: bytes of the head.
        untied_bytes: bytes of the checkpoint including the head.
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
    """A text on what :func:`_unrotated` changes in a recipe that rotates the residual stream."""
    step = recipe.step("rotate")
    assert step is not None
    heads = ": the residual stream left out, value heads alone are rotated"
    rest = heads if _rotates_heads(step) else " left out"
    return f"rotate{rest} and smooth takes the inputs behind norms"


def _unrotated(recipe: Recipe, *, keep_final: bool = False) -> tuple[Step, ...]:
    """The transforms of ``recipe`` without a rotation of the residual stream.

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
