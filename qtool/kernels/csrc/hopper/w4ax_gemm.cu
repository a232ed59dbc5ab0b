// Y = X W^T for s4 weights and s8 tokens with scales by channel or by group. The host defines the
// upper-case names (qtool/kernels/hopper/w4ax.py, qtool/kernels/hopper/gemm.py).
#include "hopper/weights_s4.cuh"

using Weights = WeightsS4<LAYOUT, GROUP, SCALE, TOKENS>;

#include "hopper/entry.cuh"
