// Y = X W^T for the three W4A8 schemes. The host defines the upper-case names
// (qtool/kernels/hopper/gemm.py).
#include "hopper/weights_w4.cuh"

using Weights = Weights4<SCHEME, GROUP>;

#include "hopper/entry.cuh"
