// Y = X W^T for s4 weights by s4 tokens, or by tokens of which some blocks of 128 inputs are s8.
// The host defines the upper-case names (qtool/kernels/mma/w4ax.py, qtool/kernels/mma/gemm.py).
#include "mma/mma_s4.cuh"

using Operand = MmaS4<LAYOUT, GROUP, SCALE, MIXED, ROW_WARPS, TOKEN_WARPS, WARP_TOKENS>;
using Kernel = MmaGemm<Operand, OUT, ROW_WARPS, TOKEN_WARPS, WARP_TOKENS, STAGES>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1) qtool_mma_gemm(const __grid_constant__ MmaParams p) {
    Kernel::run(p);
}
