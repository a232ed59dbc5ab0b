"""GPTQ: gptq.py is the method on one weight, rounding.py a recipe's rounding of a block by it.

hessian.py sums up what gptq.py is given, factor.py factors it, clip_search.py fits the groups'
parameters, sparsegpt.py prunes; memory.py says how much of all this is held at once.
"""
