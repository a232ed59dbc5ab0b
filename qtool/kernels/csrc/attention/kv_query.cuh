// The query rows as the B operand of mma.sync m16n8k16, in the order of the key fragments' slots
// (kv_codes.cuh).
#pragma once
#include "attention/kv_codes.cuh"
#include "attention/kv_params.cuh"

// Two floats rounded to f16, `low` in the low half; and back.
__device__ __forceinline__ u32 pack_halves(float low, float high) {
    return pack_pair<kFloat16>(low, high);
}
__device__ __forceinline__ void unpack_halves(u32 pair, float& low, float& high) {
    low = half_as_float(static_cast<u16>(pair), kFloat16), high = half_as_float(static_cast<u16>(pair >> 16), kFloat16);
}

// The lane's part of the query rows, unconverted, in the order of the key fragments' slots. They
// are loaded before the first tiles: after these they would wait until the memory has delivered all
// tiles.
struct QueryWords {
    u32 words[ROW_TILES][kSteps][2];
    float scale[BITS == 8 ? kSteps : 1][4];  // kv8: of the keys' channels

    __device__ __forceinline__ void load(const Params& p, int bh, int row0, int rows, int lane) {
        const int r = lane / 4, c = lane % 4;
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            const int row = row0 + 8 * n + r;
            const u16* const q = p.query + bh / p.heads * p.query_stride +
                                 (static_cast<u64>(bh % p.heads) * rows + (row < rows ? row : row0)) * DIM;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                if constexpr (BITS == 4) {
                    const int byte = c * kKeyBytes + s / 2 * 4 + s % 2;
                    const int other = byte + (kSteps % 2 && s == kSteps - 1 ? 1 : 2);
                    words[n][s][0] = *reinterpret_cast<const u32*>(q + 2 * byte);
                    words[n][s][1] = *reinterpret_cast<const u32*>(q + 2 * other);
                } else {
                    const uint2 four = *reinterpret_cast<const uint2*>(q + c * kKeyBytes + 4 * s);
                    words[n][s][0] = four.x, words[n][s][1] = four.y;
                }
            }
        }
        if constexpr (BITS == 8) {
            const float* const scales = static_cast<const float*>(p.k_scale) + bh % p.heads * DIM + c * kKeyBytes;
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
#pragma unroll
                for (int i = 0; i < 4; ++i) scale[s][i] = scales[4 * s + i];
        }
    }
    // Slots 2c, 2c + 1, 2c + 8, 2c + 9 of a step; kv8: times the keys' scales.
    __device__ __forceinline__ void slots(float (&f)[4], int n, int s) const {
        const u32 first = words[n][s][0], second = words[n][s][1];
        f[0] = widen(first & 0xFFFF), f[3] = widen(second >> 16);
        f[1] = widen(BITS == 4 ? second & 0xFFFF : first >> 16);
        f[2] = widen(BITS == 4 ? first >> 16 : second & 0xFFFF);
        if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) f[i] *= scale[s][i];
        }
    }
};

// The lane's part of the query rows in f16. A row is multiplied by 2^-e, where 2^e <= its largest
// magnitude < 2^(e + 1), which f16 holds without overflow. kv4's odd channels are divided by 16
// besides, since their codes come 16 times too large.
struct Query {
    u32 b[ROW_TILES][kSteps][2];  // rows scaled by a power of two into f16's range
    // Of the rows of columns 2c, 2c + 1: what undoes the powers of two (of the codes too) and
    // scales the scores; and the sum of the row as it was rounded, in the codes' unit 2^-24.
    float factor[ROW_TILES][2];
    float sum[ROW_TILES][2];

    __device__ __forceinline__ Query(const QueryWords& from, float scaling, int valid_rows, int lane) {
        const int r = lane / 4, c = lane % 4;
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            float f[4], top = 0.f, sums = 0.f;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                from.slots(f, n, s);
#pragma unroll
                for (int i = 0; i < 4; ++i) top = fmaxf(top, fabsf(f[i]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 2));
            const u32 exponent = min(253, max(1, static_cast<int>(__float_as_uint(top) >> 23)));
            const float down = 8 * n + r < valid_rows ? __uint_as_float((254 - exponent) << 23) : 0.f;
            const float odd = BITS == 4 ? 1.f / 16 : 1.f;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                from.slots(f, n, s);
                b[n][s][0] = pack_halves(f[0] * down, f[1] * down);
                b[n][s][1] = pack_halves(f[2] * down * odd, f[3] * down * odd);
                unpack_halves(b[n][s][0], f[0], f[1]);
                unpack_halves(b[n][s][1], f[2], f[3]);
                sums += (f[0] + f[1] + (f[2] + f[3]) * 16) * 0x1p-24f;  // as the codes are
            }
            sums += __shfl_xor_sync(0xFFFFFFFF, sums, 1);
            sums += __shfl_xor_sync(0xFFFFFFFF, sums, 2);
            const float up = __uint_as_float(exponent << 23) * (BITS == 4 ? 0x1p24f : 1.f) * scaling;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                factor[n][j] = __shfl_sync(0xFFFFFFFF, up, 4 * (2 * c + j));
                sum[n][j] = __shfl_sync(0xFFFFFFFF, sums, 4 * (2 * c + j));
            }
        }
    }
};
