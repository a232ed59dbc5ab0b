"""Quantization of a linear's input."""
