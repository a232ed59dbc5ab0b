// The outputs of each token's experts, weighted and added in the order in which the token chose them. The host defines DTYPE:
// the dtype of the experts' outputs and of the sums.
#include "common/element.cuh"

struct Params {
    const Element* z;     // [rows, columns]
    const int* place;     // [tokens, top] row in z of each choice, -1 for none
    const float* weight;  // [tokens, top]
    Element* y;           // [tokens, columns]
    int columns, top;
};

struct alignas(8 * sizeof(Element) < 16 ? 8 : 16) Eight {
    Element v[8];
};

constexpr int kThreads = 128, kAtOnce = 8;

extern "C" __global__ void __launch_bounds__(kThreads) combine(const __grid_constant__ Params p) {
    grid_wait();
    grid_release();
    const int pieces = (p.columns + 8 * kThreads - 1) / (8 * kThreads);
    const u64 token = blockIdx.x / pieces;
    const int column = (blockIdx.x % pieces * kThreads + threadIdx.x) * 8;
    if (column >= p.columns) return;
    const int* place = p.place + token * p.top;
    const float* weight = p.weight + token * p.top;
    float sum[8] = {};
    for (int first = 0; first < p.top; first += kAtOnce) {
        Eight z[kAtOnce];
        bool there[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            const int row = first + i < p.top ? place[first + i] : -1;
            there[i] = row >= 0;
            if (there[i]) z[i] = *reinterpret_cast<const Eight*>(p.z + static_cast<u64>(row) * p.columns + column);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (!there[i]) continue;
            const float scale = weight[first + i];
#pragma unroll
            for (int j = 0; j < 8; ++j) sum[j] = __fadd_rn(sum[j], __fmul_rn(widen(z[i].v[j]), scale));
        }
    }
    Eight y;
#pragma unroll
    for (int j = 0; j < 8; ++j) y.v[j] = narrow(sum[j]);
    *reinterpret_cast<Eight*>(p.y + token * p.columns + column) = y;
}
