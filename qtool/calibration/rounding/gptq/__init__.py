"""GPTQ: rounds a weight so that the outputs on calibration text change least.

The values V of a weight ``W [N, K]`` are chosen column by column. X are the inputs that the
quantized linear sees, and Z the residual stream that its outputs are added to; ``X_fp`` and
``Z_fp`` are those of the float model. Each part minimizes a cost, with the files at the right:

    GPTQ (Frantar et al. 2022, arXiv 2210.17323)
        ||X (W - V)^T||^2 = tr(E H E^T) / 2 = ||E R||^2 / 2     E = W - V
        H = 2 X^T X = R R^T, R upper triangular                 hessian.py, factor.py
        v_k = nearest(w_k + sum_{j<k} e_j R_jk / R_kk)          columns.py
    output matching (arXiv 2504.02692; with the stream: arXiv 2509.06297)
        ||X_fp W^T - X V^T||^2, ||Z_fp + X_fp W^T - Z - X V^T||^2
        S = W D, D = 2 (X_fp - X)^T X; with the stream:
        S = 2 (Z_fp + X_fp W^T - Z - X W^T)^T X                 hessian.py
        T = W + S H^-1 takes the place of W                     gptq.py
    coordinate descent, and scales by least squares
        tr(E H E^T)                                             E = T - V
        v_k = nearest(t_k + sum_{j!=k} e_j H_jk / H_kk)         columns.py
        one float scale after the other                         ../scales.py
    the output side (arXiv 2505.22988)
        tr(G E H E^T)                                           output_hessian.py
        T of some rows moves by the errors of those before      rows.py

In GPTQ's sum j ends before k: R is upper triangular, so column k of ``E R`` depends on the errors
up to ``e_k`` alone, and ``e_k`` is chosen when those before it are known. :mod:`.gptq` has the
equations as they are computed: H is damped, options weigh the parts of S, and columns are visited
by falling ``H_kk``.

Read the files in this order:

1. ``reference_gptq`` in tests/calibration/rounding/test_columns.py: algorithm 1 as printed. A test
   there checks that :func:`~qtool.calibration.rounding.gptq.gptq.gptq` without its extras gives the
   same codes.
2. gptq.py: the method on one weight, or on several of one shape.
3. hessian.py sums the moments H, D and S; factor.py damps and factors H.
4. clip_search.py fits the parameters of the groups by a search of the best clip.
5. sparsegpt.py chooses the weights that a 2:4 scheme prunes.
6. columns.py rounds the columns in turn, for GPTQ and for coordinate descent.
7. output_hessian.py finds G by a backward pass; rows.py moves targets by the errors of other rows.
8. rounding.py is the recipe's method: all linears of a block. residual_stream.py finds the norms
   and the token sizes that linears need which write to the residual stream.
9. memory.py says how much is held at once, and cost.py what ``qtool plan`` counts.
10. columns_triton.py and group_error_triton.py: GPU kernels of columns.py and clip_search.py.
"""
