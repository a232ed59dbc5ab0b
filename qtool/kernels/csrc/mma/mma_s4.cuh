// The operand of mma_gemm.cuh for s4 weights (layouts apex4 and w4ax-interleaved): by s4 tokens on
// the s4 tensor cores, and by s8 tokens on the s8 ones in the steps of 128 inputs whose tokens have
// 8 bits (W4Ax).
//
// Both layouts keep 32 inputs of an output channel in 16 bytes. ldmatrix gives lane 4 c + q of such
// 16 bytes of row c the word q, which is its register of an m16n8k64 fragment. In which order a
// layout has the 32 inputs does not matter: s4 tokens are packed in the same order
// (qtool/kernels/activation/quantize_packed_groups.py), and a sum over K does not change by a
// permutation that weight and tokens share. 128 inputs of a token are 64 bytes.
//
// For s8 tokens the same words become registers of m16n8k32 (COMET section 4.3): w << 4 and w,
// each & 0xF0F0F0F0, are the low and the high nibbles as s8, 16 times too large. The factor 1 / 16
// goes into the scale, exactly. The low nibbles are the first 16 inputs of the instruction, the
// high ones the last 16, and the tokens' codes come in that order
// (qtool/kernels/activation/arrangement.py).
//
// If groups of inputs have scales, the int32 sum of each becomes a float and is scaled in the main
// loop (promote). This needs no conversion: a group's sums start from the bits of the float
// 2^23 + 2^22 instead of 0. From 2^23 to 2^24 floats are 1 apart, so adding an integer below 2^22
// in magnitude to the bits adds it to the float. The sums of 128 inputs are at most
// 128 * 128 * 128 = 2^21.
//
// Legend: c = lane / 4, q = lane % 4; a *vector* is 16 bytes, 32 inputs of a row or of a token.
#pragma once
#include "mma/mma_gemm.cuh"
#include "common/operands.cuh"

// kLayout: enum Layout. kGroup: inputs that share a scale; 0 if each channel has one. kScale: the
// kind of the weight's group scales. kMixedTokens: some steps have s8 tokens; kGroup is 128 or 0
// then. The others: as of MmaGemm.
template <int kLayout, int kGroup, int kScale, bool kMixedTokens, int kRowWarps, int kTokenWarps, int kWarpTokens>
struct MmaS4 {
    static constexpr bool kMixed = kMixedTokens, kScaled = kGroup > 0, kZero = false;
    using Sum = typename SumOf<kScaled>::Type;
    static constexpr int kThreads = 32 * kRowWarps * kTokenWarps, kRows = 32 * kRowWarps, kTokens = kTokenWarps * kWarpTokens;
    // The groups whose scales a stage holds, for each row and token.
    static constexpr int kGroups = !kScaled ? 0 : kGroup < 128 ? 128 / kGroup : 1;
    static constexpr int kScaleBytes = kScale == kFloat32 ? 4 : 2;
    // A stage: tokens, 64 bytes each (swizzled_64) if s4 and 128 (swizzled_128) if s8;
    // the codes of each row, 64 bytes (swizzled_64); the scales of the rows and those of the
    // tokens, [groups][rows] and [groups][tokens].
    static constexpr int kCodesAt = kTokens * (kMixed ? 128 : 64), kScalesAt = kCodesAt + kRows * 64;
    static constexpr int kTokenScalesAt = kScalesAt + kGroups * kRows * kScaleBytes;
    static constexpr int kStageBytes = kTokenScalesAt + kGroups * kTokens * 4;
    static constexpr int kMagic = 0x4B400000;  // the bits of 1.5 * 2^23

    // Starts the copies of a step for the tile whose first row and token are n and m. What lies
    // beyond N, M or K arrives as zeros. Scales beyond the last group are those of the last group:
    // any finite scale will do, as the codes are zeros. apex4 has the vectors of all rows side by
    // side for each 32 inputs, w4ax-interleaved the vectors of a row: neighbouring threads copy
    // neighbouring vectors of either.
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

    // A lane's words of a stage: [16-row fragment][64 inputs][register]. Registers 0 and 1 are rows
    // c and c + 8 of the first 32 inputs, 2 and 3 of the last 32.
    using Words = u32[2][2][4];

    // Adds the products of the stage to this warp's sums. `eight_bit`: the tokens of this step are
    // s8.
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
    // `token`: the row whose address this lane gives ldmatrix for the first block of tokens.
    // `scales`, `token_scales`: the addresses of this lane's first scale of rows and of tokens. A
    // token's 128 inputs are the four vectors of one ldmatrix: b[i] is this lane's register of the
    // i-th.
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
                        if constexpr (kGroup == 32) {  // group g is one vector
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

    // The same for s8 tokens: 128 bytes a token, eight pieces of 16 inputs in two ldmatrix.
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
                    // Exact, since d is 16 times the sum.
#pragma unroll
                    for (int r = 0; r < 4; ++r) sums[i][j][r] += d[r] >> 4;
                }
            }
        }
    }

    // The scales of rows c, c + 8, c + 16 and c + 24, times `factor`, for each of kCount groups of
    // the stage.
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

    // total += sum * sx * sw for the sums of one group, a 16-row fragment and a block of tokens. d
    // holds the bits of 1.5 * 2^23 plus the sum. `sw`: the scales of rows c and c + 8.
    static __device__ __forceinline__ void promote(Sum (&total)[4], const int (&d)[4], const float* sw, u32 token_scales) {
        const float2 sx = load_floats(token_scales);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            total[i] = fmaf((__int_as_float(d[i]) - 12582912.f) * (i % 2 ? sx.y : sx.x), sw[i / 2], total[i]);
    }
};
