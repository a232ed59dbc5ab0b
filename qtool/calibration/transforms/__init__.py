"""Transforms: each changes weights before rounding and keeps the float model's output."""
