"""Attention over the packed KV cache, and appending to it."""
