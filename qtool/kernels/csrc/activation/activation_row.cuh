// A row of activations in a block's registers, eight values a thread and piece: x, or what the model computes just before
// a linear, fused: x gathered, RMSNorm(x) * weight, RMSNorm(x + residual) * weight, SiLU(gate) * up, rounded to the input's
// dtype where the unfused model rounds it, so that fusing changes speed only. The host defines DTYPE, FUSION, GATHER, THREADS, PIECES.
#pragma once
#include "common/element.cuh"

enum Fusion { kPlain = 0, kRmsNorm = 1, kSiluUp = 2, kResidualNorm = 3 };

// Where a row comes from.
struct Input {
    const void* x;         // [M, K]; SiLU: [M, 2 K], gate then up
    const void* residual;  // [M, K] that is added to x before the norm
    void* added;           // [M, K], written: x + residual
    const int* order;      // [K] input channel of each code, or null
    const void* norm;      // [K], RMSNorm's weight
};

struct alignas(8 * sizeof(Element) < 16 ? 8 : 16) Eight {
    Element v[8];
};

enum Reduction { kMax, kSum };

// Over the block; every thread gets the result.
template <int kReduction, class T>
__device__ __forceinline__ T reduce(T v, T* scratch) {
    const auto join = [](T a, T b) { return kReduction == kMax ? (a > b ? a : b) : a + b; };
#pragma unroll
    for (int step = 16; step; step /= 2) v = join(v, __shfl_xor_sync(0xFFFFFFFF, v, step));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    T all = scratch[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; ++w) all = join(all, scratch[w]);
    __syncthreads();
    return all;
}

// y [PIECES][8]: value j of piece i is column (i * THREADS + threadIdx.x) * 8 + j; zeros beyond K.
__device__ __forceinline__ void load_row(float (&y)[PIECES][8], const Input& in, u64 row, int k, float epsilon, float* scratch) {
    const Element* x = static_cast<const Element*>(in.x) + row * k * (FUSION == kSiluUp ? 2 : 1);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = (i * THREADS + threadIdx.x) * 8;
        const bool valid = column < k;
#pragma unroll
        for (int j = 0; j < 8; ++j) y[i][j] = 0.f;
        if (!valid) continue;
        if constexpr (GATHER) {
#pragma unroll
            for (int j = 0; j < 8; ++j) y[i][j] = widen(x[in.order[column + j]]);
        } else {
            const Eight here = *reinterpret_cast<const Eight*>(x + column);
#pragma unroll
            for (int j = 0; j < 8; ++j) y[i][j] = widen(here.v[j]);
        }
        if constexpr (FUSION == kSiluUp) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float up = widen(x[k + (GATHER ? in.order[column + j] : column + j)]);
                y[i][j] = rounded(rounded(y[i][j] / (1.f + expf(-y[i][j]))) * up);
            }
        }
        if constexpr (FUSION == kResidualNorm) {
            const Element* residual = static_cast<const Element*>(in.residual) + row * k;
            Element* added = static_cast<Element*>(in.added) + row * k;
            if constexpr (GATHER) {
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const int from = in.order[column + j];
                    y[i][j] += widen(residual[from]);
                    added[from] = narrow(y[i][j]);
                }
            } else {
                Eight here = *reinterpret_cast<const Eight*>(residual + column);
#pragma unroll
                for (int j = 0; j < 8; ++j) here.v[j] = narrow(y[i][j] += widen(here.v[j]));
                *reinterpret_cast<Eight*>(added + column) = here;
            }
        }
    }
    if constexpr (FUSION == kRmsNorm || FUSION == kResidualNorm) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) squares += y[i][j] * y[i][j];
        const float inverse = rsqrtf(reduce<kSum>(squares, scratch) / k + epsilon);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int column = (i * THREADS + threadIdx.x) * 8;
            if (column >= k) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int from = GATHER ? in.order[column + j] : column + j;
                y[i][j] = rounded(rounded(y[i][j] * inverse) * widen(static_cast<const Element*>(in.norm)[from]));
            }
        }
    }
}
