"""Transforms: each changes the weights before rounding and keeps the float model's output."""
