"""GPTQ: gptq.py is the method on one weight, rounding.py a recipe's rounding of a block by it.

hessian.py sums the moments that gptq.py needs, factor.py factors the Hessian, clip_search.py fits
the groups' parameters, sparsegpt.py prunes, columns.py rounds the columns in turn, and
residual_stream.py has what is particular to linears that write to the residual stream.
output_hessian.py finds how much each output of a linear counts, and rows.py lets the rows make up
for each other by that. memory.py says how much is held at once, and cost.py what ``qtool plan``
counts. The two ``_triton`` files are GPU kernels of functions that are also there in torch.

To read GPTQ beside the paper (arXiv 2210.17323), begin with ``reference_gptq`` in
tests/calibration/rounding/test_columns.py: algorithm 1 as printed, column by column. A test there
checks that :func:`~qtool.calibration.rounding.gptq.gptq.gptq` without its extras gives the same
codes.
"""
