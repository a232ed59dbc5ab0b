"""Recipes: data that composes methods; one YAML a scheme."""

from qtool.recipes.recipe import VARIANTS, built_in, departures, load, overview, parse, read
from qtool.recipes.schema import Departure, LayerRule, Recipe, Step

__all__ = [
    "VARIANTS",
    "Departure",
    "LayerRule",
    "Recipe",
    "Step",
    "built_in",
    "departures",
    "load",
    "overview",
    "parse",
    "read",
]
