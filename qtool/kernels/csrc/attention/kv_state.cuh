// The running softmax and the weighted sums of one warp, and their update by a tile's scores.
#pragma once
#include "attention/kv_query.cuh"
#include "attention/kv_ring.cuh"

constexpr int kRows = 8 * ROW_TILES, kTiles16 = TILE / 16;
// The reference maximum may lie up to kLag powers of two below the true one, so weights p reach
// 2^kLag. p times the value's scale is kept below 2^(kHeadroom + kLag + 1), high in f16's range.
constexpr int kLag = 8;
constexpr int kHeadroom = 6;
constexpr int kPitch = DIM + 4;  // floats of a row of the exchange: no bank conflicts in its stores

// [16-token tile][tile of 8 query rows]: rows r (token of r; then of r + 8) by columns 2c, 2c + 1;
// in base 2.
typedef float Scores[kTiles16][ROW_TILES][4];

// 2^exponent, for exponents of normal numbers.
__device__ __forceinline__ float powers(int exponent) { return __uint_as_float((127 + exponent) << 23); }

// Transposes an 8 x 8 matrix of 16-bit items (PTX ISA, "movmatrix"). Lane i has two items of row
// i / 4, columns 2 (i % 4) and the next. Scores have tokens as rows; as the right operand of the
// second product they are needed by query row.
__device__ __forceinline__ u32 transpose8x8(u32 pair) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
    return d;
}
// The largest value and the sum over the eight lanes that share c = lane % 4.
__device__ __forceinline__ float largest(float v) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, step));
    return v;
}
__device__ __forceinline__ float total(float v) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) v += __shfl_xor_sync(0xFFFFFFFF, v, step);
    return v;
}

// Index [n][j] is query row 8 n + 2c + j.
struct State {
    float top[ROW_TILES][2];    // the reference maximum, in base 2
    float sum[ROW_TILES][2];    // the lane's share of sum p
    float zeros[ROW_TILES][2];  // the lane's share of sum (p s) (z - 8)
    // O^T: channels, in the row tiles of kv_codes.cuh, by query rows.
    float o[ROW_TILES][kSteps][4];
    // The exponent field (f16) of the largest value scale so far: p s is kept times
    // 2^(kHeadroom + 15 - exponent).
    int exponent;

    __device__ __forceinline__ State() {
        exponent = BITS == 4 ? 0 : 15;  // kv8: as if every token's scale were 1
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                top[n][j] = kNone;
                sum[n][j] = zeros[n][j] = 0.f;
            }
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
#pragma unroll
                for (int j = 0; j < 4; ++j) o[n][i][j] = 0.f;
        }
    }

    // Moves the reference maximum and the exponent if the tile's scores or scales have outgrown
    // them, and scales what has been summed so far to match. The maximum may lag by kLag, so that
    // this is rare.
    __device__ __forceinline__ void follow(const Scores& s, const Stage& stage, int lane) {
        const int wanted = BITS == 4 ? max(exponent, stage.largest_scale(lane) >> 10) : exponent;
        bool grew = wanted != exponent;
        float here[ROW_TILES][2];
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float x = s[0][n][j];
#pragma unroll
                for (int u = 0; u < kTiles16; ++u) x = fmaxf(x, fmaxf(s[u][n][j], s[u][n][2 + j]));
                here[n][j] = largest(x);
                grew |= here[n][j] > top[n][j] + kLag;
            }
        if (!__any_sync(0xFFFFFFFF, grew)) return;
        const float shift = powers(exponent - wanted);
        exponent = wanted;
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const float now = fmaxf(top[n][j], here[n][j]), kept = power_of_two(top[n][j] - now);
                top[n][j] = now;
                sum[n][j] *= kept;
                zeros[n][j] *= kept * shift;
#pragma unroll
                for (int i = 0; i < kSteps; ++i) {
                    o[n][i][j] *= kept * shift;
                    o[n][i][2 + j] *= kept * shift;
                }
            }
    }

    // Weights from scores, and the values they weigh.
    __device__ __forceinline__ void add(const Scores& s, const Stage& stage, int lane) {
#pragma unroll
        for (int u = 0; u < kTiles16; ++u) {
            u32 weights[ROW_TILES][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float scale = powers(kHeadroom + 15 - exponent), zero = 0.f;
                if constexpr (BITS == 4) {
                    const int token = 16 * u + 8 * half + token_of(lane / 4);
                    scale *= stage.parameter(kValueScale, token);
                    zero = stage.parameter(kValueZero, token) - 8.f;
                }
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) {
                    float w[2];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float weight = power_of_two(s[u][n][2 * half + j] - top[n][j]);
                        sum[n][j] += weight;
                        w[j] = weight * scale;
                        if (BITS == 4) zeros[n][j] += w[j] * zero;
                    }
                    weights[n][half] = transpose8x8(pack_halves(w[0], w[1]));
                }
            }
            Values values;
            values.load(stage.values() + 16 * u * kTokenBytes, lane);
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                u32 a[4];
                values.fragment(a, i);
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) multiply(o[n][i], a, weights[n]);
            }
        }
    }

    // The warp's part of the exchange: its rows' sums in the order (row tile of channels, lane's r,
    // parity); and their reference maxima and sums of weights.
    __device__ __forceinline__ void store(float* parts, float2* stats, int lane) const {
        const int r = lane / 4, c = lane % 4;
        const float undo = powers(exponent - kHeadroom - 15), odd = BITS == 4 ? 1.f / 16 : 1.f;
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int row = 8 * n + 2 * c + j;
                const float zero = total(zeros[n][j]), weight = total(sum[n][j]);
#pragma unroll
                for (int i = 0; i < kSteps; ++i)
                    *reinterpret_cast<float2*>(parts + row * kPitch + 16 * i + 2 * r) =
                        make_float2((o[n][i][j] - zero) * undo, (o[n][i][2 + j] * odd - zero) * undo);
                if (r == 0) stats[row] = make_float2(top[n][j], weight);
            }
    }
};
