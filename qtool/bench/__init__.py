"""Measurements that `qtool bench` makes: GEMMs, attention and whole quantization runs beside their
floors.
"""
