"""Recipes: data that composes methods; one YAML a scheme."""

from qtool.recipes.recipe import VARIANTS, LayerRule, Recipe, Step, load, overview, parse

__all__ = ["VARIANTS", "LayerRule", "Recipe", "Step", "load", "overview", "parse"]
