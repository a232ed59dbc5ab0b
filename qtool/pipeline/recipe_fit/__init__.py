"""Fits a recipe to a model: family, layer rules, tiles of layouts."""
