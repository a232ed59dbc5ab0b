"""CUDA kernels as ``torch.library`` ops, each with an exact CPU reference; compiled when first
used.
"""
