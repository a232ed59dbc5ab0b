// Y = X W^T for 2:4 sparse 4-bit weights in the marlin-24 layout and 16-bit tokens. The host
// defines the upper-case names (qtool/kernels/hopper/w4a16.py, qtool/kernels/hopper/gemm.py).
#include "hopper/weights_marlin.cuh"

using Weights = WeightsMarlin<Marlin24<KIND, TOKENS>, GROUP, SCALE, KIND, TOKENS, STEP>;

#include "hopper/entry.cuh"
