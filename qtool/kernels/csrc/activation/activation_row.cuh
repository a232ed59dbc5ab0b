// A row of activations in a block's registers, eight values a thread and piece: x, or what the model computes just before
// a linear, fused: x gathered, RMSNorm(x) * weight, RMSNorm(x + residual) * weight, SiLU(gate) * up, rounded to the input's
// dtype where the unfused model rounds it, so that fusing changes speed only. The host defines DTYPE, FUSION, GATHER, THREADS, PIECES
// and CLUSTER: the blocks that share a row, since one multiprocessor takes long for a wide one.
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

// The block's row, and the first of the eight columns that the thread has of a piece.
__device__ __forceinline__ u64 row_of_block() { return blockIdx.x / CLUSTER; }
__device__ __forceinline__ int column_of(int piece) { return ((blockIdx.x % CLUSTER * PIECES + piece) * THREADS + threadIdx.x) * 8; }

// The reductions of a row. In a cluster each has a place where the blocks tell each other their parts, counted on a barrier.
enum Reduction { kTop, kSquares, kSumOfCodes };
struct Exchange {
    u64 full[3];
    u32 parts[3][CLUSTER];
};
__shared__ Exchange exchange;

// Before anything is told: all blocks of the cluster have started.
__device__ __forceinline__ void open_exchange() {
    if constexpr (CLUSTER > 1) {
        if (threadIdx.x < 3) {
            const u32 bar = smem_address(exchange.full + threadIdx.x);
            mbar_init(bar, 1);
            mbar_expect(bar, 4 * CLUSTER);
            mbar_init_fence();
        }
        cluster_arrive();
        cluster_wait();
    }
}

// Over the row; every thread gets the result. Each reduction is made once.
template <int kReduction, class T>
__device__ __forceinline__ T reduce(T v, T* scratch) {
    const auto join = [](T a, T b) { return kReduction == kTop ? (a > b ? a : b) : a + b; };
#pragma unroll
    for (int step = 16; step; step /= 2) v = join(v, __shfl_xor_sync(0xFFFFFFFF, v, step));
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = v;
    __syncthreads();
    T all = scratch[0];
#pragma unroll
    for (int w = 1; w < THREADS / 32; ++w) all = join(all, scratch[w]);
    __syncthreads();
    if constexpr (CLUSTER > 1) {
        const u32 bar = smem_address(exchange.full + kReduction), rank = threadIdx.x;
        if (rank < CLUSTER) send_word(remote(smem_address(exchange.parts[kReduction] + cluster_rank()), rank), remote(bar, rank), all);
        mbar_wait(bar, 0);
        const T* parts = reinterpret_cast<const T*>(exchange.parts[kReduction]);
        all = parts[0];
#pragma unroll
        for (int b = 1; b < CLUSTER; ++b) all = join(all, parts[b]);
    }
    return all;
}

// y [PIECES][8]: value j of piece i is column column_of(i) + j; zeros beyond K.
__device__ __forceinline__ void load_row(float (&y)[PIECES][8], const Input& in, u64 row, int k, float epsilon, float* scratch) {
    const Element* x = static_cast<const Element*>(in.x) + row * k * (FUSION == kSiluUp ? 2 : 1);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = column_of(i);
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
            Eight up;
            if constexpr (GATHER) {
#pragma unroll
                for (int j = 0; j < 8; ++j) up.v[j] = x[k + in.order[column + j]];
            } else {
                up = *reinterpret_cast<const Eight*>(x + k + column);
            }
#pragma unroll
            for (int j = 0; j < 8; ++j) y[i][j] = rounded(rounded(y[i][j] / (1.f + expf(-y[i][j]))) * widen(up.v[j]));
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
        const float inverse = rsqrtf(reduce<kSquares>(squares, scratch) / k + epsilon);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int column = column_of(i);
            if (column >= k) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int from = GATHER ? in.order[column + j] : column + j;
                y[i][j] = rounded(rounded(y[i][j] * inverse) * widen(static_cast<const Element*>(in.norm)[from]));
            }
        }
    }
}
