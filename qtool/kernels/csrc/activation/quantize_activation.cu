// Per-token s8 quantization, one row per cluster of blocks: sx = max|y| / 127, code = rne(y / sx), a row of zeros gets sx = 1.
// The host defines SORTED if the codes go to rows that are sorted by expert.
#include "activation/activation_row.cuh"

// The codes rne(y / scale) of eight values, a byte each. The rounded 1 / scale decides, except within 2^-15 of the
// middle between two codes and for numbers that are not finite, where the quotient decides.
__device__ __forceinline__ uint2 codes_of(const float (&y)[8], float scale, float inverse) {
    constexpr float kInteger = 12582912.f;  // 1.5 * 2^23: a sum with it is rounded to an integer, whose low bits are its own
    u32 code[8];
    bool clear = true;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const float shifted = fmaf(y[j], inverse, kInteger);
        clear = clear && fabsf(fmaf(y[j], inverse, kInteger - shifted)) < 0.5f - 0x1p-15f;
        code[j] = __float_as_uint(shifted);
    }
    if (!clear) {
#pragma unroll
        for (int j = 0; j < 8; ++j) code[j] = min(127, max(-128, __float2int_rn(y[j] / scale)));
    }
    u32 words[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const u32 low = __byte_perm(code[4 * i], code[4 * i + 1], 0x0040), high = __byte_perm(code[4 * i + 2], code[4 * i + 3], 0x0040);
        words[i] = __byte_perm(low, high, 0x5410);
    }
    return make_uint2(words[0], words[1]);
}

struct Params {
    Input in;
    signed char* codes;
    float* scale;
    int* sum;
    int m, k;
    float epsilon;
#ifdef SORTED
    const int* place;  // [M, top] rows of the output, -1 for none; null: each token has its own row
    const int* end;    // the number of rows
    int top;
#endif
};

extern "C" __global__ void __launch_bounds__(THREADS)
#if CLUSTER > 1
    __cluster_dims__(CLUSTER)
#endif
        quantize_activation(const __grid_constant__ Params p) {
    __shared__ float scratch[THREADS / 32];
    open_exchange();
    grid_wait();
    grid_release();
    const u64 row = row_of_block();
#ifdef SORTED
    if (!p.place && row >= *p.end) return;
#endif
    float y[PIECES][8];
    load_row(y, p.in, row, p.k, p.epsilon, scratch);

    float top = 0.f;
#pragma unroll
    for (int i = 0; i < PIECES; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j) top = fmaxf(top, fabsf(y[i][j]));
    top = reduce<kTop>(top, scratch);
    const float scale = top > 0.f ? fmaxf(top / 127.f, 1.17549435e-38f) : 1.f;

    const float inverse = 1.f / scale;
    int sum = 0;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = column_of(i);
        if (column >= p.k) continue;
        const uint2 codes = codes_of(y[i], scale, inverse);
        sum = __dp4a(static_cast<int>(codes.y), 0x01010101, __dp4a(static_cast<int>(codes.x), 0x01010101, sum));
#ifdef SORTED
        for (int i = 0; i < p.top; ++i)
            if (const int to = p.place ? p.place[row * p.top + i] : row; to >= 0)
                *reinterpret_cast<uint2*>(p.codes + static_cast<u64>(to) * p.k + column) = codes;
#else
        *reinterpret_cast<uint2*>(p.codes + row * p.k + column) = codes;
#endif
    }
#ifdef SORTED
    sum = reduce<kSumOfCodes>(sum, reinterpret_cast<int*>(scratch));
    for (int i = threadIdx.x; i < p.top; i += THREADS)
        if (const int to = p.place ? p.place[row * p.top + i] : row; to >= 0) p.sum[to] = sum, p.scale[to] = scale;
#else
    if (p.sum) {
        sum = reduce<kSumOfCodes>(sum, reinterpret_cast<int*>(scratch));
        if (threadIdx.x == 0) p.sum[row] = sum;  // all blocks of a row write the same
    }
    if (threadIdx.x == 0) p.scale[row] = scale;
#endif
}
