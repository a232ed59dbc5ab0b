// Y = X W^T for s4 weights and s8 tokens with scales by channel or by group. The host defines the upper-case names
// (qtool/kernels/hopper/w4ax.py, qtool/kernels/hopper/gemm.py).
#include "hopper/gemm.cuh"
#include "hopper/weights_s4.cuh"

using Weights = WeightsS4<LAYOUT, GROUP, SCALE, TOKENS>;
using Kernel = Gemm<Weights, Epilogue<Weights, OUT, TOKENS>, TOKENS, ROWS / 128, SPLIT, STAGES>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, BLOCKS_PER_SM)
#if SPLIT > 1
    __cluster_dims__(SPLIT)
#endif
        qtool_gemm(const __grid_constant__ Params p) {
    Kernel::run(p);
}
