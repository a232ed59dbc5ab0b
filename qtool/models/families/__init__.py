"""Declared model families, one file each."""
