// The operand of mma_gemm.cuh for W4A8: 4-bit weights in the compute-aware layout
// (qtool/layouts/compute_aware.py) by s8 tokens.
//
// A tile of the layout is 32 rows x 32 inputs in 512 bytes, of which a lane has 16: one load brings
// it the codes of both of its m16n8k32 fragments. The low nibbles of word r are register r of rows
// 0 to 15, the high nibbles that of rows 16 to 31.
//
// With two levels of scales, a code q becomes the s8 weight q s + lo (LiquidQuant) or (q - z) s
// (QoQ), where s and lo or z belong to the row and the group of inputs. This takes one IMAD and one
// XOR for the four codes of a word:
//     (codes * s + c * 0x01010101) ^ 0x80808080        (LiquidGEMM eq. 12)
// where c = 128 + lo, or c = 128 - z s for QoQ's subtraction after multiplication (QServe section
// 4.2.2, figure 10b). Each byte of the sum is its weight plus 128, which lies in 0..255 because the
// weight is an s8. So no carry or borrow goes from byte to byte, although c may be negative, and
// the word is right modulo 2^32. The XOR subtracts 128 from each byte: with its highest bit
// flipped, v + 128 is v in two's complement. QServe's own vadd4 takes five instructions in the
// XOR's place: 6 to 10 % of the whole GEMM on an H200.
//
// With scales per channel alone (QoQ), the codes 0..15 are multiplied as they are, and the epilogue
// subtracts the zero point times the sum of the token's codes.
//
// Legend: l = lane / 4 (the first row of a lane in 32), c of Level2 the constant above.
#pragma once
#include "mma/mma_gemm.cuh"
#include "common/operands.cuh"

// kScheme: enum Scheme. kGroup: inputs that share level-2 parameters, 32, 64 or 128. The others: as
// of MmaGemm.
template <int kScheme, int kGroup, int kRowWarps, int kTokenWarps, int kWarpTokens>
struct MmaW4A8 {
    using Sum = int;
    static constexpr bool kMixed = false, kScaled = false, kZero = kScheme == kQoqChannel, kTwoLevels = !kZero;
    static constexpr int kThreads = 32 * kRowWarps * kTokenWarps, kRows = 32 * kRowWarps, kTokens = kTokenWarps * kWarpTokens;
    // A stage: 128 bytes of each token, swizzled (swizzled_128); the codes of 32 rows after
    // another, four tiles each; then the scales and the offsets, [groups][rows] bytes each.
    static constexpr int kTile = 512;  // bytes of 32 rows x 32 columns
    static constexpr int kCodesAt = kTokens * 128, kLevel2At = kCodesAt + kRows * 64;
    static constexpr int kGroups = kTwoLevels ? 128 / kGroup : 0;  // of a row in a stage
    static constexpr int kStageBytes = kLevel2At + 2 * kGroups * kRows;

    // Starts the copies of a step for the tile whose first row and token are n and m. Codes and
    // tokens beyond N, M or K arrive as zeros. Parameters beyond the last group are those of the
    // last group: their products are zero, since the tokens are zeros there. A strip is 32 rows,
    // whose tiles for all of K lie one after another.
    static __device__ __forceinline__ void load(const MmaParams& p, u32 stage, int n, int m, int step, bool) {
        const int columns = p.k / 32;  // tiles of a strip of 32 rows
#pragma unroll 2
        for (int i = threadIdx.x; i < kRows * 4; i += kThreads) {
            const int strip = n / 32 + i / 128, column = 4 * step + i % 128 / 32;
            const bool valid = strip * 32 < p.n && column < columns;
            const u8* from = p.qweight + (static_cast<u64>(strip) * columns + 4 * step) * kTile + i % 128 * 16;
            async_copy(stage + kCodesAt + i * 16, valid ? from : p.qweight, valid);
        }
#pragma unroll 2
        for (int i = threadIdx.x; i < kTokens * 8; i += kThreads) {
            const int token = m + i / 8, k = step * 128 + i % 8 * 16;
            const bool valid = token < p.m && k < p.k;
            const u8* from = p.tokens + static_cast<u64>(token) * p.k + k;
            async_copy(stage + swizzled_128(i / 8, i % 8), valid ? from : p.tokens, valid);
        }
        if constexpr (kTwoLevels) {
            constexpr int kPieces = kRows / 16;  // of a parameter of a group
            for (int i = threadIdx.x; i < 2 * kGroups * kPieces; i += kThreads) {
                const int group = min(step * kGroups + i / kPieces % kGroups, p.k / kGroup - 1), row = n + i % kPieces * 16;
                const u8* from = i < kGroups * kPieces ? p.scale2 : p.offset2;
                const bool valid = row < p.n;
                async_copy(stage + kLevel2At + i * 16, valid ? from + static_cast<u64>(group) * p.n + row : from, valid);
            }
        }
    }

    // s and c * 0x01010101 of a lane's rows l, l + 8, l + 16, l + 24 for one group.
    struct Level2 {
        u32 s[4], c[4];
        // `at`: the four bytes of these rows' scales in shared memory, adjacent in this order in
        // the layout; their offsets lie kGroups * kRows bytes further. __byte_perm(w, 0,
        // 0x4440 + i) is byte i of w, zero-extended (4 selects a byte of the 0); 0x1111 * i repeats
        // it in all four bytes.
        __device__ __forceinline__ void read(u32 at) {
            const u32 scales = load_word(at), offsets = load_word(at + kGroups * kRows);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[i] = __byte_perm(scales, 0, 0x4440 + i);
                if constexpr (kScheme == kLqq) c[i] = __byte_perm(offsets, 0, 0x1111 * i);
                else c[i] = (128 - s[i] * __byte_perm(offsets, 0, 0x4440 + i)) * 0x01010101u;
            }
        }
        // Four s8 weights of the i-th of these rows.
        __device__ __forceinline__ u32 apply(u32 codes, int i) const { return (codes * s[i] + c[i]) ^ 0x80808080u; }
    };

    // Adds the products of the stage to this warp's sums, 32 inputs (u) at a time.
    static __device__ __forceinline__ void multiply(int (&sums)[2][kWarpTokens / 8][4], u32 stage, bool) {
        const int lane = threadIdx.x % 32, row_warp = threadIdx.x / 32 % kRowWarps, token_warp = threadIdx.x / 32 / kRowWarps;
        [[maybe_unused]] Level2 level2;
#pragma unroll
        for (int u = 0; u < 4; ++u) {
            if (kTwoLevels && u % (kGroup / 32) == 0)
                level2.read(stage + kLevel2At + u * 32 / kGroup * kRows + 32 * row_warp + lane / 4 * 4);
            const uint4 packed = load_vector(stage + kCodesAt + (row_warp * 4 + u) * kTile + lane * 16);
            const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
            // [16-row fragment][register]. Registers 0, 2 are row l of the 16, 1 and 3 row l + 8.
            u32 a[2][4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                const u32 low = words[r] & 0x0F0F0F0Fu, high = (words[r] >> 4) & 0x0F0F0F0Fu;
                a[0][r] = kTwoLevels ? level2.apply(low, r % 2) : low;
                a[1][r] = kTwoLevels ? level2.apply(high, 2 + r % 2) : high;
            }
#pragma unroll
            for (int j = 0; j < kWarpTokens / 8; j += 2) {
                // Two blocks of tokens: b[0], b[1] are inputs 0-15 and 16-31 of the first, b[2],
                // b[3] of the second.
                u32 b[4];
                const int token = token_warp * kWarpTokens + 8 * j + lane % 8 + lane / 16 * 8;
                load_matrices(b, stage + swizzled_128(token, 2 * u + lane / 8 % 2));
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    mma_s8(sums[i][j], a[i], b);
                    mma_s8(sums[i][j + 1], a[i], b + 2);
                }
            }
        }
    }
};
