// Y = X W^T for the W4A8 schemes in the compute-aware layout. The host defines the upper-case names
// (qtool/kernels/mma/w4a8.py, qtool/kernels/mma/gemm.py).
#include "mma/mma_w4a8.cuh"

using Operand = MmaW4A8<SCHEME, GROUP, ROW_WARPS, TOKEN_WARPS, WARP_TOKENS>;
using Kernel = MmaGemm<Operand, OUT, ROW_WARPS, TOKEN_WARPS, WARP_TOKENS, STAGES>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, 1) qtool_mma_gemm(const __grid_constant__ MmaParams p) {
    Kernel::run(p);
}
