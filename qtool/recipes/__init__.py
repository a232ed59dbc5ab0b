"""Recipes: data that composes methods; one YAML a scheme."""

from qtool.recipes.recipe import (
    VARIANTS,
    LayerRule,
    Recipe,
    Step,
    built_in,
    load,
    overview,
    parse,
    read,
)

__all__ = [
    "VARIANTS",
    "LayerRule",
    "Recipe",
    "Step",
    "built_in",
    "load",
    "overview",
    "parse",
    "read",
]
