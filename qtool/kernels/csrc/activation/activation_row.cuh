// A row of activations in a block's registers, eight values per thread and piece. The row is x, or the fused operation that the
// model computes just before a linear: RMSNorm(x) * weight, RMSNorm(x + residual) * weight or SiLU(gate) * up, rounded to the
// input's dtype where the unfused model rounds it, so that fusing changes speed only. It may be gathered, then rotated if ROTATE.
// The host defines DTYPE, FUSION, GATHER, ROTATE, THREADS, PIECES and CLUSTER, the number of blocks that share a row, since one
// multiprocessor takes long for a wide row.
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

__device__ __forceinline__ Eight narrow(const float (&y)[8]) {
    Eight all;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
#if DTYPE == 0
        all.v[j] = y[j], all.v[j + 1] = y[j + 1];
#else
        const u32 both = narrow_pair(y[j], y[j + 1]);
        all.v[j] = both, all.v[j + 1] = both >> 16;
#endif
    }
    return all;
}
__device__ __forceinline__ void round(float (&y)[8]) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) round_pair(y[j], y[j + 1]);
}

// Values [column, column + 8) of a row, or the values of the channels at these places of `order`.
__device__ __forceinline__ Eight eight_of(const void* row, const int* order, int column) {
    const Element* x = static_cast<const Element*>(row);
    Eight all;
    if constexpr (GATHER) {
#pragma unroll
        for (int j = 0; j < 8; ++j) all.v[j] = x[order[column + j]];
    } else {
        all = *reinterpret_cast<const Eight*>(x + column);
    }
    return all;
}

// SiLU. To 16 bits, gate / (1 + exp(-gate)) is gate times an approximate reciprocal, corrected by the remainder. This is the
// rounded quotient, except that for one value in a million the last of 24 bits differs. Beyond 80 the quotient itself is computed.
__device__ __forceinline__ void silu(float (&gate)[8]) {
#pragma unroll
    for (int half = 0; half < 8; half += 4) {  // takes fewer registers than all eight at once
        bool usual = DTYPE != 0;
        float found[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float g = gate[half + j], divisor = 1.f + expf(-g);
            float inverse;
            asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(divisor));
            const float quotient = g * inverse;
            found[j] = fmaf(fmaf(-quotient, divisor, g), inverse, quotient);
            usual = usual && fabsf(g) < 80.f;
        }
        if (!usual) {
#pragma unroll
            for (int j = 0; j < 4; ++j) found[j] = gate[half + j] / (1.f + expf(-gate[half + j]));
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) gate[half + j] = found[j];
    }
}

// The block's row, and the first of the thread's eight columns of a piece.
__device__ __forceinline__ u64 row_of_block() { return blockIdx.x / CLUSTER; }
__device__ __forceinline__ int column_of(int piece) { return ((blockIdx.x % CLUSTER * PIECES + piece) * THREADS + threadIdx.x) * 8; }

// The reductions of a row. In a cluster each reduction has a place where the blocks exchange their parts, counted on a barrier.
enum Reduction { kTop, kSquares, kSumOfCodes };
struct Exchange {
    u64 full[3];
    u32 parts[3][CLUSTER];
};
__shared__ Exchange exchange;

// Before the first exchange: waits until all blocks of the cluster have started.
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

// Reduces over the row; every thread gets the result. Each reduction may be made once.
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

// Multiplies each 64 columns, held by eight neighbouring threads, by the Hadamard matrix of 64 over 8, in the order of sums of
// qtool/schemes/arithmetic/online_hadamard.py.
__device__ __forceinline__ void rotate(float (&y)[8]) {
#pragma unroll
    for (int width = 1; width < 8; width *= 2) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            if (j & width) continue;
            const float low = y[j], high = y[j + width];
            y[j] = low + high, y[j + width] = low - high;
        }
    }
#pragma unroll
    for (int lane = 1; lane < 8; lane *= 2) {
        const bool high = threadIdx.x & lane;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float other = __shfl_xor_sync(0xFFFFFFFF, y[j], lane);
            y[j] = high ? other - y[j] : y[j] + other;
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) y[j] *= 0.125f;
}

// y [PIECES][8]: value j of piece i is column column_of(i) + j; zeros beyond K.
__device__ __forceinline__ void load_row(float (&y)[PIECES][8], const Input& in, u64 row, int k, float epsilon, float* scratch) {
    const Element* x = static_cast<const Element*>(in.x) + row * k * (FUSION == kSiluUp ? 2 : 1);
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = column_of(i);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[i][j] = 0.f;
        if (column >= k) continue;
        const Eight here = eight_of(x, in.order, column);
#pragma unroll
        for (int j = 0; j < 8; ++j) y[i][j] = widen(here.v[j]);
        if constexpr (FUSION == kSiluUp) {
            const Eight up = eight_of(x + k, in.order, column);
            silu(y[i]);
            round(y[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) y[i][j] *= widen(up.v[j]);
            round(y[i]);
        }
        if constexpr (FUSION == kResidualNorm) {
            const Eight residual = eight_of(static_cast<const Element*>(in.residual) + row * k, in.order, column);
#pragma unroll
            for (int j = 0; j < 8; ++j) y[i][j] += widen(residual.v[j]);
            const Eight sum = narrow(y[i]);
            Element* added = static_cast<Element*>(in.added) + row * k;
            if constexpr (GATHER) {
#pragma unroll
                for (int j = 0; j < 8; ++j) added[in.order[column + j]] = sum.v[j];
            } else {
                *reinterpret_cast<Eight*>(added + column) = sum;
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
            const Eight norm = eight_of(in.norm, in.order, column);
#pragma unroll
            for (int j = 0; j < 8; ++j) y[i][j] *= inverse;
            round(y[i]);
#pragma unroll
            for (int j = 0; j < 8; ++j) y[i][j] *= widen(norm.v[j]);
            round(y[i]);
        }
    }
    if constexpr (ROTATE) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) rotate(y[i]);
    }
}
