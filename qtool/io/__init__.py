"""Bytes in and out: safetensors, source checkpoints, output directories, reading ahead and writing
behind.
"""
