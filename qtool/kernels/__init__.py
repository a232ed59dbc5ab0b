"""CUDA kernels as ``torch.library`` ops, each with an exact CPU reference.

They are compiled at first use.
"""
