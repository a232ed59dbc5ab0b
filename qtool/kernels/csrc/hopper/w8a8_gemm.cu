// Y = X W^T for per-channel s8 weights. The host defines the upper-case names (qtool/kernels/hopper/gemm.py).
#include "hopper/gemm.cuh"
#include "hopper/weights_s8.cuh"

using Kernel = Gemm<Weights8, Epilogue<Weights8, OUT, TOKENS>, TOKENS, ROWS / 128, SPLIT, STAGES>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, BLOCKS_PER_SM)
#if SPLIT > 1
    __cluster_dims__(SPLIT)
#endif
        qtool_gemm(const __grid_constant__ Params p) {
    Kernel::run(p);
}
