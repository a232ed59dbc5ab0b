// Y = X W^T for 4-bit weights in the marlin layout and 16-bit tokens. The host defines the
// upper-case names (qtool/kernels/hopper/w4a16.py, qtool/kernels/hopper/gemm.py).
#include "hopper/weights_marlin.cuh"

using Weights = WeightsMarlin<Marlin<KIND, TOKENS>, GROUP, SCALE, KIND, TOKENS, STEP>;

#include "hopper/entry.cuh"
