"""Transforms: each changes the weights before rounding and leaves the float model's output as it
was.
"""
