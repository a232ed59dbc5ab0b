// Per-token s8 quantization of one row a block: sx = max|y| / 127, code = rne(y / sx), a row of zeros gets sx = 1.
// y is x, or x gathered, or RMSNorm(x) * weight, or SiLU(gate) * up; the fused ones are rounded to the input's dtype
// where the unfused model rounds them, so that fusing changes speed only.
#include "ptx.cuh"

enum Fusion { kPlain = 0, kRmsNorm = 1, kSiluUp = 2 };

struct Params {
    const void* x;     // [M, K]; SiLU: [M, 2 K], gate then up
    const int* order;  // [K] input channel of each code, or null
    const void* norm;  // [K], RMSNorm's weight
    signed char* codes;
    float* scale;
    int* sum;
    int m, k;
    float epsilon;
};

#if DTYPE == 0
typedef float Element;
__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float rounded(float v) { return v; }
#else
typedef u16 Element;
__device__ __forceinline__ float widen(u16 h) {
#if DTYPE == 2
    return __uint_as_float(static_cast<u32>(h) << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
#endif
}
__device__ __forceinline__ float rounded(float v) {
    u16 h;
#if DTYPE == 2
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
#endif
    return widen(h);
}
#endif

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

extern "C" __global__ void __launch_bounds__(THREADS) quantize_activation(const __grid_constant__ Params p) {
    __shared__ float scratch[THREADS / 32];
    grid_release();
    grid_wait();
    const u64 row = blockIdx.x;
    const Element* x = static_cast<const Element*>(p.x) + row * p.k * (FUSION == kSiluUp ? 2 : 1);

    float y[PIECES][8];
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = (i * THREADS + threadIdx.x) * 8;
        const bool valid = column < p.k;
#pragma unroll
        for (int j = 0; j < 8; ++j) y[i][j] = 0.f;
        if (!valid) continue;
        if constexpr (GATHER) {
#pragma unroll
            for (int j = 0; j < 8; ++j) y[i][j] = widen(x[p.order[column + j]]);
        } else {
            const Eight here = *reinterpret_cast<const Eight*>(x + column);
#pragma unroll
            for (int j = 0; j < 8; ++j) y[i][j] = widen(here.v[j]);
        }
        if constexpr (FUSION == kSiluUp) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float up = widen(x[p.k + (GATHER ? p.order[column + j] : column + j)]);
                y[i][j] = rounded(rounded(y[i][j] / (1.f + expf(-y[i][j]))) * up);
            }
        }
    }
    if constexpr (FUSION == kRmsNorm) {
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) squares += y[i][j] * y[i][j];
        const float inverse = rsqrtf(reduce<kSum>(squares, scratch) / p.k + p.epsilon);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int column = (i * THREADS + threadIdx.x) * 8;
            if (column >= p.k) continue;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int from = GATHER ? p.order[column + j] : column + j;
                y[i][j] = rounded(rounded(y[i][j] * inverse) * widen(static_cast<const Element*>(p.norm)[from]));
            }
        }
    }

    float top = 0.f;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) top = fmaxf(top, fabsf(y[i][j]));
    top = reduce<kMax>(top, scratch);
    const float scale = top > 0.f ? top / 127.f : 1.f;

    int sum = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = (i * THREADS + threadIdx.x) * 8;
        if (column >= p.k) continue;
        u32 packed[2] = {0, 0};
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const int code = min(127, max(-128, __float2int_rn(y[i][j] / scale)));
            sum += code;
            packed[j / 4] |= (code & 0xFFu) << (8 * (j % 4));
        }
        *reinterpret_cast<uint2*>(p.codes + row * p.k + column) = make_uint2(packed[0], packed[1]);
    }
    if (p.sum) {
        sum = reduce<kSum>(sum, reinterpret_cast<int*>(scratch));
        if (threadIdx.x == 0) p.sum[row] = sum;
    }
    if (threadIdx.x == 0) p.scale[row] = scale;
}
