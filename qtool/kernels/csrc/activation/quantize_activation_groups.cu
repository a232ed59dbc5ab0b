// Symmetric s4 (in 8-bit blocks s8) quantization, one row per block and one scale per group: sx = max|y| / 7 (or 127), code =
// rne(y / sx), a group of zeros gets sx = 1. Codes are s8 bytes in the order of the weight's layout
// (qtool/kernels/activation/arrangement.py). The host also defines GROUP (0: the row), ARRANGEMENT and PACKED: 1 stores s4 codes
// as nibbles, K / 2 bytes a row; 2 does so for 4-bit blocks only, in the first 64 of each block's 128 bytes.
#include "activation/activation_row.cuh"

enum Arrangement { kNone = 0, kApex4 = 1, kInterleaved = 2 };

struct Params {
    Input in;
    const u8* eight_bit;  // [G], or null: every group has 4 bits
    signed char* codes;   // [M, K]
    float* scale;         // [G, M rounded up to 4]
    int m, k;
    float epsilon;
};

// The largest |y| of the group of each piece of this thread.
__device__ __forceinline__ void group_tops(float (&top)[PIECES], const float (&y)[PIECES][8], float* scratch) {
    constexpr int kWarps = THREADS / 32, kLanes = GROUP == 0 || GROUP > 256 ? 32 : GROUP / 8;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        top[i] = 0.f;
#pragma unroll
        for (int j = 0; j < 8; ++j) top[i] = fmaxf(top[i], fabsf(y[i][j]));
#pragma unroll
        for (int lanes = 1; lanes < kLanes; lanes *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(0xFFFFFFFF, top[i], lanes));
    }
    if constexpr (GROUP == 0) {
        float all = top[0];
#pragma unroll
        for (int i = 1; i < PIECES; ++i) all = fmaxf(all, top[i]);
        all = reduce<kTop>(all, scratch);
#pragma unroll
        for (int i = 0; i < PIECES; ++i) top[i] = all;
    }
    if constexpr (GROUP > 256) {  // a group spans several warps
        constexpr int kSpan = GROUP / 256;
        const int warp = threadIdx.x / 32;
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
            if (threadIdx.x % 32 == 0) scratch[i * kWarps + warp] = top[i];
        __syncthreads();
#pragma unroll
        for (int i = 0; i < PIECES; ++i)
#pragma unroll
            for (int w = 0; w < kSpan; ++w) top[i] = fmaxf(top[i], scratch[i * kWarps + warp / kSpan * kSpan + w]);
    }
}

__device__ __forceinline__ u32 pack(int a, int b, int c, int d) {
    return (a & 0xFFu) | (b & 0xFFu) << 8 | (c & 0xFFu) << 16 | (d & 0xFFu) << 24;
}

// The codes of 8 inputs among those of 32 (at `to`); all lanes of the warp must call it.
__device__ __forceinline__ void store(signed char* to, const int (&c)[8], bool valid) {
    const int place = threadIdx.x % 4;
    if constexpr (ARRANGEMENT == kNone) {
        if (valid) reinterpret_cast<uint2*>(to)[place] = make_uint2(pack(c[0], c[1], c[2], c[3]), pack(c[4], c[5], c[6], c[7]));
    } else if constexpr (ARRANGEMENT == kApex4) {
        if (valid) reinterpret_cast<u32*>(to)[place] = pack(c[0], c[2], c[4], c[6]);
        if (valid) reinterpret_cast<u32*>(to)[4 + place] = pack(c[1], c[3], c[5], c[7]);
    } else {  // the neighbour's inputs share words with these: each of the two stores eight bytes
        const u32 low = pack(c[0], c[1], c[4], c[5]), high = pack(c[2], c[3], c[6], c[7]);
        const bool second = place % 2;
        const u32 other = __shfl_xor_sync(0xFFFFFFFF, second ? low : high, 1);
        const u32 first8 = second ? other : low, last8 = second ? high : other;
        const uint2 words = make_uint2(__byte_perm(first8, last8, 0x5410), __byte_perm(first8, last8, 0x7632));
        if (valid) reinterpret_cast<uint2*>(to)[place % 2 * 2 + place / 2] = words;
    }
}

__device__ __forceinline__ u32 nibbles(int a, int b, int c, int d) {
    return (a & 0xF) | (b & 0xF) << 4 | (c & 0xF) << 8 | (d & 0xF) << 12;
}

// The codes of 8 inputs among the 16 bytes of 32, as the layout packs the weight's.
__device__ __forceinline__ void store_nibbles(u8* to, const int (&c)[8]) {
    const int place = threadIdx.x % 4;
    if constexpr (ARRANGEMENT == kApex4) {
        reinterpret_cast<u32*>(to)[place] = nibbles(c[0], c[1], c[2], c[3]) | nibbles(c[4], c[5], c[6], c[7]) << 16;
    } else {
        u16* words = reinterpret_cast<u16*>(to) + place / 2 * 4 + place % 2;
        words[0] = nibbles(c[0], c[2], c[1], c[3]);
        words[2] = nibbles(c[4], c[6], c[5], c[7]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) quantize_activation_groups(const __grid_constant__ Params p) {
    __shared__ float scratch[PIECES * THREADS / 32];
    grid_wait();
    grid_release();
    const u64 row = blockIdx.x;
    float y[PIECES][8], top[PIECES];
    load_row(y, p.in, row, p.k, p.epsilon, scratch);
    group_tops(top, y, scratch);

    const int size = GROUP ? GROUP : p.k, padded = (p.m + 3) / 4 * 4;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int column = (i * THREADS + threadIdx.x) * 8, group = column / size;
        const bool valid = column < p.k;
        const float most = valid && p.eight_bit && p.eight_bit[group] ? 127.f : 7.f;
        const float scale = top[i] > 0.f ? fmaxf(top[i] / most, 1.17549435e-38f) : 1.f;
        int code[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) code[j] = __float2int_rn(y[i][j] / scale);
        u8* codes = reinterpret_cast<u8*>(p.codes) + row * (PACKED == 1 ? p.k / 2 : p.k);
        if constexpr (PACKED != 1) store(reinterpret_cast<signed char*>(codes) + column / 32 * 32, code, valid && (!PACKED || most > 7.f));
        if (PACKED == 1 && valid) store_nibbles(codes + column / 32 * 16, code);
        if (PACKED == 2 && valid && most == 7.f) {
            u8* block = codes + column / 128 * 128;
            store_nibbles(block + column % 128 / 32 * 16, code);
            reinterpret_cast<u32*>(block + 64)[column % 128 / 8] = 0;
        }
        if (valid && column % size == 0) {
            float* to = p.scale + static_cast<u64>(group) * padded;
            to[row] = scale;
            if (row == p.m - 1)
                for (int r = p.m; r < padded; ++r) to[r] = 1.f;
        }
    }
}
