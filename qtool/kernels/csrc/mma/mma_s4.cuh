// s4 weights (apex4 or w4ax-interleaved) by s4 tokens on the s4 tensor cores, blocks of s8 tokens on the s8 ones.
//
// Both layouts keep 32 inputs of an output channel in 16 bytes whose words are the fragments of m16n8k64: ldmatrix
// delivers them. Tokens of 4 bits are packed in the layout's order of inputs (a sum does not see an order that both
// share), 128 of them in 64 bytes. Where a block's tokens have 8 bits (COMET, w4ax-interleaved), the same words become s8
// by zero extension, 16 times too large (section 4.3), and 1 / 16 goes into the scale, exactly: low nibbles are the first
// 16 inputs of an instruction, high ones the last, and the tokens lie in that order (qtool/kernels/activation/arrangement.py).
//
// A group's sums start from the bits of 2^23 + 2^22, so that they are floats to begin with: below 2^22 in magnitude
// (128 * 127 * 128 = 2.1e6), an int32 added to those bits is the same added to the number.
#pragma once
#include "mma/mma_gemm.cuh"
#include "common/operands.cuh"

// kGroup: 0 is the whole channel. kScale: the kind of the group scales.
template <int kLayout, int kGroup, int kScale, bool kMixedTokens, int kRowWarps, int kTokenWarps, int kWarpTokens>
struct MmaS4 {
    static constexpr bool kMixed = kMixedTokens, kScaled = kGroup > 0, kZero = false;
    using Sum = typename SumOf<kScaled>::Type;
    static constexpr int kThreads = 32 * kRowWarps * kTokenWarps, kRows = 32 * kRowWarps, kTokens = kTokenWarps * kWarpTokens;
    static constexpr int kGroups = !kScaled ? 0 : kGroup < 128 ? 128 / kGroup : 1;  // of a row in a stage
    static constexpr int kScaleBytes = kScale == kFloat32 ? 4 : 2;
    static constexpr int kCodesAt = kTokens * (kMixed ? 128 : 64), kScalesAt = kCodesAt + kRows * 64;
    static constexpr int kTokenScalesAt = kScalesAt + kGroups * kRows * kScaleBytes;
    static constexpr int kStageBytes = kTokenScalesAt + kGroups * kTokens * 4;
    static constexpr int kMagic = 0x4B400000;  // the bits of 1.5 * 2^23

    // Beyond the weight and the tokens there are zeros; scales are then another group's, finite.
    static __device__ __forceinline__ void load(const MmaParams& p, u32 stage, int n, int m, int step, bool eight_bit) {
        const int vectors = p.k / 32;
#pragma unroll
        for (int i = threadIdx.x; i < kRows * 4; i += kThreads) {
            const int slot = kLayout == kApex4 ? i % kRows : i / 4, u = kLayout == kApex4 ? i / kRows : i % 4;
            const int row = n + slot, column = 4 * step + u;
            const bool valid = row < p.n && column < vectors;
            const u64 at = kLayout == kApex4 ? static_cast<u64>(column) * p.n + row : static_cast<u64>(row) * vectors + column;
            async_copy(stage + kCodesAt + swizzled_64(slot, u), p.qweight + (valid ? 16 * at : 0), valid);
        }
        if (kMixed && eight_bit) {
#pragma unroll
            for (int i = threadIdx.x; i < kTokens * 8; i += kThreads) {
                const bool valid = m + i / 8 < p.m;
                const u8* from = p.tokens + static_cast<u64>(m + i / 8) * p.k + step * 128 + i % 8 * 16;
                async_copy(stage + swizzled_128(i / 8, i % 8), valid ? from : p.tokens, valid);
            }
        } else {
#pragma unroll
            for (int i = threadIdx.x; i < kTokens * 4; i += kThreads) {
                const bool valid = m + i / 4 < p.m && 4 * step + i % 4 < vectors;
                const u8* from = p.tokens + static_cast<u64>(m + i / 4) * (kMixed ? p.k : p.k / 2) + step * (kMixed ? 128 : 64) + i % 4 * 16;
                async_copy(stage + swizzled_64(i / 4, i % 4), valid ? from : p.tokens, valid);
            }
        }
        if constexpr (kScaled) {
            constexpr int kPerPiece = 16 / kScaleBytes, kPieces = kRows / kPerPiece;
            const int last = p.k / kGroup - 1, first = kGroup < 128 ? step * kGroups : step / (kGroup / 128);
            for (int i = threadIdx.x; i < kGroups * kPieces; i += kThreads) {
                const int group = min(first + i / kPieces, last), row = n + i % kPieces * kPerPiece;
                const bool valid = row < p.n;
                const u8* from = static_cast<const u8*>(p.scale1) + (static_cast<u64>(group) * p.n + row) * kScaleBytes;
                async_copy(stage + kScalesAt + i * 16, valid ? from : p.scale1, valid);
            }
            const int pitch = (p.m + 3) / 4 * 4;
            for (int i = threadIdx.x; i < kGroups * kTokens / 4; i += kThreads) {
                const int group = min(first + i / (kTokens / 4), last), token = m + i % (kTokens / 4) * 4;
                const bool valid = token < p.m;
                const float* from = p.token_scale + static_cast<u64>(group) * pitch + token;
                async_copy(stage + kTokenScalesAt + i * 16, valid ? from : p.token_scale, valid);
            }
        }
    }

    // This warp's words of a stage: [fragment][k64 instruction][register].
    using Words = u32[2][2][4];

    static __device__ __forceinline__ void multiply(Sum (&sums)[2][kWarpTokens / 8][4], u32 stage, bool eight_bit) {
        const int lane = threadIdx.x % 32, row_warp = threadIdx.x / 32 % kRowWarps, token_warp = threadIdx.x / 32 / kRowWarps;
        Words words;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            load_matrices(words[i / 2][i % 2], stage + kCodesAt + swizzled_64(32 * row_warp + i / 2 * 16 + lane % 16, i % 2 * 2 + lane / 16));
        const u32 scales = stage + kScalesAt + (32 * row_warp + lane / 4) * kScaleBytes;
        const u32 token_scales = stage + kTokenScalesAt + (token_warp * kWarpTokens + lane % 4 * 2) * 4;
        const int token = token_warp * kWarpTokens + lane % 8;
        if (kMixed && eight_bit) by_s8(sums, words, stage, token, scales, token_scales);
        else by_s4(sums, words, stage, token, scales, token_scales);
    }

  private:
    static __device__ __forceinline__ void by_s4(Sum (&sums)[2][kWarpTokens / 8][4], const Words& words, u32 stage, int token,
                                                 u32 scales, u32 token_scales) {
        const int lane = threadIdx.x % 32;
        float sw[kScaled ? kGroups : 1][4];
        read_scales(sw, scales, 1.f);
#pragma unroll
        for (int j = 0; j < kWarpTokens / 8; ++j) {
            u32 b[4];
            load_matrices(b, stage + swizzled_64(token + 8 * j, lane / 8));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if constexpr (!kScaled) {
                    mma_s4_k64(sums[i][j], words[i][0], b);
                    mma_s4_k64(sums[i][j], words[i][1], b + 2);
                } else {
#pragma unroll
                    for (int g = 0; g < kGroups; ++g) {
                        int d[4] = {kMagic, kMagic, kMagic, kMagic};
                        if constexpr (kGroup == 32) {
                            mma_s4_k32(d, words[i][g / 2] + g % 2 * 2, b + g);
                        } else {
#pragma unroll
                            for (int h = g * 2 / kGroups; h < (g + 1) * 2 / kGroups; ++h) mma_s4_k64(d, words[i][h], b + 2 * h);
                        }
                        promote(sums[i][j], d, sw[g] + 2 * i, token_scales + (g * kTokens + 8 * j) * 4);
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ void by_s8(Sum (&sums)[2][kWarpTokens / 8][4], const Words& words, u32 stage, int token,
                                                 u32 scales, u32 token_scales) {
        const int lane = threadIdx.x % 32;
        float sw[1][4];
        read_scales(sw, scales, 0.0625f);
        u32 a[2][4][4];  // [fragment][k32 instruction][register]
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int u = 0; u < 4; ++u)
#pragma unroll
                for (int h = 0; h < 2; ++h) {  // rows q and q + 8
                    const u32 word = words[i][u / 2][u % 2 * 2 + h];
                    a[i][u][h] = (word << 4) & 0xF0F0F0F0u;
                    a[i][u][2 + h] = word & 0xF0F0F0F0u;
                }
#pragma unroll
        for (int j = 0; j < kWarpTokens / 8; ++j) {
            u32 b[2][4];
            load_matrices(b[0], stage + swizzled_128(token + 8 * j, lane / 8));
            load_matrices(b[1], stage + swizzled_128(token + 8 * j, 4 + lane / 8));
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                constexpr int kStart = kScaled ? kMagic : 0;
                int d[4] = {kStart, kStart, kStart, kStart};
#pragma unroll
                for (int u = 0; u < 4; ++u) mma_s8(d, a[i][u], b[u / 2] + u % 2 * 2);
                if constexpr (kScaled) {
                    promote(sums[i][j], d, sw[0] + 2 * i, token_scales + 32 * j);
                } else {
#pragma unroll
                    for (int r = 0; r < 4; ++r) sums[i][j][r] += d[r] >> 4;
                }
            }
        }
    }

    // Of rows q, q + 8, q + 16, q + 24, for each group of the stage.
    template <int kCount>
    static __device__ __forceinline__ void read_scales(float (&sw)[kCount][4], u32 at, float factor) {
        if constexpr (kScaled) {
#pragma unroll
            for (int g = 0; g < kCount; ++g)
#pragma unroll
                for (int i = 0; i < 4; ++i) sw[g][i] = factor * load_scale(at + (g * kRows + 8 * i) * kScaleBytes);
        }
    }
    static __device__ __forceinline__ float load_scale(u32 at) {
        if constexpr (kScale == kFloat32) {
            return __uint_as_float(load_word(at));
        } else {
            const u16 bits = load_half(at);
            return load_as_float(&bits, 0, kScale);
        }
    }

    static __device__ __forceinline__ void promote(Sum (&total)[4], const int (&d)[4], const float* sw, u32 token_scales) {
        const float2 sx = load_floats(token_scales);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            total[i] = fmaf((__int_as_float(d[i]) - 12582912.f) * (i % 2 ? sx.y : sx.x), sw[i / 2], total[i]);
    }
};
