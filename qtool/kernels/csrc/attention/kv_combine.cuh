// The second pass of attention, if its tokens were split.
#pragma once
#include "attention/kv_params.cuh"

// A block adds the splits' parts of one query row in their order, a thread per channel. The first
// warp makes the weights meanwhile: 2^(a split's maximum - the largest) over the sum of all
// weights. Parts without weight are not used, since their values were not written.
extern "C" __global__ void __launch_bounds__(DIM < 32 ? 32 : DIM) kv_combine(const __grid_constant__ Params p) {
    __shared__ float weights[MOST_SPLITS];
    grid_wait();
    grid_release();
    const u64 row = blockIdx.x;
    const int channel = threadIdx.x;
    const float2* const stats = reinterpret_cast<const float2*>(p.partial) + row * p.splits;
    const float* const parts = p.partial + static_cast<u64>(p.all_rows) * p.splits * 2 + row * p.splits * DIM + channel;
    constexpr int kBatch = 16;  // loads in flight; the first ones while the weights are made
    float batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = i < p.splits && channel < DIM ? parts[i * DIM] : 0.f;
    if (channel < 32) {
        float top = kNone, sum = 0.f;
        for (int i = channel; i < p.splits; i += 32) top = fmaxf(top, stats[i].x);
#pragma unroll
        for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, step));
        for (int i = channel; i < MOST_SPLITS; i += 32) {
            weights[i] = i < p.splits ? power_of_two(stats[i].x - top) : 0.f;
            if (i < p.splits) sum += weights[i] * stats[i].y;
        }
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
        const float inverse = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
        for (int i = channel; i < MOST_SPLITS; i += 32) weights[i] *= inverse;
    }
    __syncthreads();
    if (channel >= DIM) return;
    float value = 0.f;
    for (int first = 0;; first += kBatch) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (weights[first + i] > 0.f) value += weights[first + i] * batch[i];
        if (first + kBatch >= p.splits) break;
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            batch[i] = first + kBatch + i < p.splits ? parts[(first + kBatch + i) * DIM] : 0.f;
    }
    p.out[row * DIM + channel] = narrow(value);
}
