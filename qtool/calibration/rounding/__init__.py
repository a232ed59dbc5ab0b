"""Rounding methods: each turns the weights of a block into codes and parameters of a scheme."""
