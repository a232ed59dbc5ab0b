// Y = X W^T for per-channel s8 weights. The host defines the upper-case names
// (qtool/kernels/hopper/gemm.py).
#include "hopper/weights_s8.cuh"

using Weights = Weights8;

#include "hopper/entry.cuh"
