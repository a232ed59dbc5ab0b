// The kernel of a source that has defined `Weights`, its weight operand. The host defines the
// upper-case names (qtool/kernels/hopper/gemm.py); EXPERTS if the weight holds those of a mixture's
// experts, one after another.
#pragma once
#include "hopper/gemm.cuh"

#ifdef EXPERTS
#define TILING EachExpert
#else
#define TILING OneWeight
#endif

using Kernel = Gemm<Weights, Epilogue<Weights, OUT, TOKENS>, TOKENS, ROWS / 128, SPLIT, STAGES, TILING>;

extern "C" __global__ void __launch_bounds__(Kernel::kThreads, BLOCKS_PER_SM)
#if SPLIT > 1
    __cluster_dims__(SPLIT)
#endif
        qtool_gemm(const __grid_constant__ Params p) {
    Kernel::run(p);
}
