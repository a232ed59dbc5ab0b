// Y = X W^T for 4-bit weights in the marlin layout and 16-bit tokens. The host defines the
// upper-case names (qtool/kernels/mma/half_gemm.py).
#include "mma/half_gemm.cuh"

using Shape = HalfShape<Marlin<KIND>, KIND, SCALE, OUT, GROUP, TOKENS, TOKEN_WARPS, COLUMN_WARPS, TEAMS, SPLIT, STAGES, HOPPER>;

extern "C" __global__ void __launch_bounds__(Shape::kThreads, BLOCKS_PER_SM)
#if HOPPER && SPLIT > 1
    __cluster_dims__(SPLIT)
#endif
        qtool_gemm(const __grid_constant__ HalfParams p) {
    HalfGemm<Shape>::run(p);
}

// The second pass, launched after the kernel above if several blocks share the sum over K and are
// no cluster.
#if !HOPPER && SPLIT > 1
extern "C" __global__ void __launch_bounds__(256) qtool_add_splits(const __grid_constant__ HalfParams p) {
    HalfFinish<Shape>::add_splits(p);
}
#endif
