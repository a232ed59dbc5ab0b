"""Arithmetic that several schemes share: grids, levels, activations, integer products."""
