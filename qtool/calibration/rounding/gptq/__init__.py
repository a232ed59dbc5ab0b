"""GPTQ: gptq.py is the method on one weight, rounding.py a recipe's rounding of a block by it.

hessian.py sums up what gptq.py is given, factor.py factors it, clip_search.py fits the groups'
parameters, sparsegpt.py prunes; memory.py says how much of all this is held at once. The two
``_triton`` files are GPU kernels of what stands beside them in torch.

To read it beside the paper (arXiv 2210.17323), begin with ``reference_gptq`` in
tests/calibration/rounding/test_columns.py: algorithm 1 as printed, column by column. The test there
holds :func:`~qtool.calibration.rounding.gptq.gptq.gptq` without its extras to the same codes.
"""
