// Y = X W^T for 4-bit weights in the marlin layout and 16-bit tokens. The host defines the upper-case names
// (qtool/kernels/hopper/w4a16.py, qtool/kernels/hopper/gemm.py).
#include "hopper/gemm.cuh"
#include "hopper/weights_marlin.cuh"

using Weights = WeightsMarlin<GROUP, SCALE, KIND, TOKENS, STEP>;
using Kernel = Gemm<Weights, Epilogue<Weights, OUT, TOKENS>, TOKENS, ROWS / 128, SPLIT, STAGES>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, BLOCKS_PER_SM)
#if SPLIT > 1
    __cluster_dims__(SPLIT)
#endif
        qtool_gemm(const __grid_constant__ Params p) {
    Kernel::run(p);
}
