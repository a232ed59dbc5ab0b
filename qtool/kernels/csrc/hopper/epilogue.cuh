// Accumulators of Y^T -> scaled, biased rows of Y, through shared memory so that stores are 16
// bytes wide. Sums of whole channels are scaled here; the float totals of scaled groups only get
// the bias.
//
// A thread holds, for each block of 8 tokens, rows q and q + 8 (q = 16 warp + lane / 4) of tokens
// 2 (lane % 4) and the next: v[0], v[1] are row q, v[2], v[3] row q + 8.
#pragma once
#include "common/convert.cuh"
#include "hopper/params.cuh"

// Scale, bias and zero point of a thread's two rows n and n + 8, read before the main loop so that
// their latency hides under it, and converted after it. Without zero points `zero` is 128: what the
// u8 weights of Weights4 are too large by.
struct Rows {
    u32 scale[2], bias[2];
    int zero[2];
    template <class Weights>
    __device__ __forceinline__ void read(const Params& p, int n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = n + 8 * h;
            const bool valid = row < p.n;
            scale[h] = valid ? load_bits(p.scale1, Weights::channel(row), p.scale1_kind) : 0;
            zero[h] = p.zero1 ? (valid ? p.zero1[row] : 0) : 128;
            bias[h] = valid && p.bias ? load_bits(p.bias, row, p.bias_kind) : 0;
        }
    }
};

// A warpgroup's. Weights::kZero: from each sum, `rows.zero` times the sum of the token's codes is
// subtracted first. kTokens: of a tile.
template <class Weights, int kOut, int kTokens>
struct Epilogue {
    static constexpr bool kWide = kOut == kFloat32 || kOut == kInt32;
    // An output has kItem bytes, the 64 rows of a token kPieces of 16 bytes. kChunk tokens are
    // staged at a time, kStride bytes apart; the 16 bytes between tokens spread the banks. One of
    // two buffers is written out while the other is filled.
    static constexpr int kItem = kWide ? 4 : 2, kPieces = 64 * kItem / 16;
    static constexpr int kChunk = (kTokens >= 128 ? 32 : 16) / (kWide ? 2 : 1);
    static constexpr int kStride = 64 * kItem + 16;
    static constexpr int kBuffer = kChunk * kStride, kBytes = 2 * kBuffer;

    const Params& p;
    u8* staging;
    const float* scales;  // of the tile's tokens
    const int* token_sums;
    int wg, t;
    int columns;  // of the output
    int end = 0;  // of the tokens whose rows may be written
    int turn = 0;

    // Blocks of 8 tokens by 64 rows, from `first_token` of the tile at (m, n).
    template <int kBlocks, class Sum>
    __device__ __forceinline__ void store(const Sum (&acc)[4 * kBlocks], const Rows& rows, int m, int n, int first_token) {
        // Blocks that are staged at a time, and tokens that the 128 threads write at once.
        constexpr int kStep = kBlocks < kChunk / 8 ? kBlocks : kChunk / 8, kPass = 128 / kPieces;
        float scale[2], bias[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            scale[h] = Weights::kGrouped ? 1.f : as_float(rows.scale[h], p.scale1_kind);
            bias[h] = as_float(rows.bias[h], p.bias_kind);
        }
        const int token = t / kPieces, piece = t % kPieces * 16;  // that this thread writes
        const int left = n < columns ? min(min(8 * kBlocks, kTokens - first_token), end - m - first_token) - token : 0;
        const u64 pitch = static_cast<u64>(columns) * kItem;
        u8* to = static_cast<u8*>(p.out) + (m + first_token + token) * pitch + n * kItem + piece;
#pragma unroll
        for (int base = 0; base < kBlocks; base += kStep) {
            float y[kStep][4];
#pragma unroll
            for (int j = 0; j < kStep; ++j)
                if (base + j < kBlocks) finish(y[j], acc + 4 * (base + j), scale, bias, rows.zero, first_token + 8 * (base + j) + 2 * (t % 4));
            u8* buffer = staging + turn * kBuffer;
            turn ^= 1;
#pragma unroll
            for (int j = 0; j < kStep; ++j)
                if (base + j < kBlocks) stage(buffer, y[j], 8 * j);
            named_barrier(2 + wg, 128);  // also: the other buffer has been read
#pragma unroll
            for (int i = 0; i < 8 * kStep; i += kPass, to += kPass * pitch)
                if (8 * base + i < left) *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(buffer + (token + i) * kStride + piece);
        }
    }

  private:
    // A block's four values of this thread, scaled.
    __device__ __forceinline__ void finish(float (&y)[4], const int* v, const float (&scale)[2], const float (&bias)[2], const int (&zero)[2],
                                           int token) const {
        const float2 sx = *reinterpret_cast<const float2*>(scales + token);
        int2 sum = {0, 0};
        if constexpr (Weights::kZero) sum = *reinterpret_cast<const int2*>(token_sums + token);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int exact = v[i] - (i % 2 ? sum.y : sum.x) * zero[i / 2];
            if constexpr (kOut == kInt32) y[i] = __int_as_float(exact);
            else y[i] = fmaf(static_cast<float>(exact) * (i % 2 ? sx.y : sx.x), scale[i / 2], bias[i / 2]);
        }
    }
    __device__ __forceinline__ void finish(float (&y)[4], const float* v, const float (&scale)[2], const float (&bias)[2], const int (&)[2],
                                           int) const {
        static_assert(kOut != kInt32, "floats are no bare sums");
#pragma unroll
        for (int i = 0; i < 4; ++i) y[i] = fmaf(v[i], scale[i / 2], bias[i / 2]);
    }

    // To the rows of 8 tokens.
    __device__ __forceinline__ void stage(u8* buffer, const float (&y)[4], int token) const {
        const int lane = t % 32, warp = t / 32;
        if constexpr (kWide) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = token + 2 * (lane % 4) + i % 2, column = 16 * warp + lane / 4 + i / 2 * 8;
                *reinterpret_cast<float*>(buffer + row * kStride + column * 4) = y[i];
            }
        } else {
            const u32 at = smem_address(buffer) + (token + lane % 8) * kStride + 2 * (16 * warp + (lane & 8));
            store_transposed(at, pack_pair<kOut>(y[0], y[1]), pack_pair<kOut>(y[2], y[3]));
        }
    }
};
