"""Recipes: data that composes methods; one YAML a scheme."""

from qtool.recipes.recipe import (
    VARIANTS,
    as_yaml,
    built_in,
    departures,
    load,
    overview,
    parse,
    read,
)
from qtool.recipes.schema import LayerRule, Recipe, Step

__all__ = [
    "VARIANTS",
    "LayerRule",
    "Recipe",
    "Step",
    "as_yaml",
    "built_in",
    "departures",
    "load",
    "overview",
    "parse",
    "read",
]
