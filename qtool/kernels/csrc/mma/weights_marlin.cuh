// The two weight operands of the 16-bit GEMM (half_gemm.cuh): how the codes of a warp's 64 output
// channels lie in shared memory, and their products with tokens. The codes are mma's left operand,
// the tokens the right one.
//
// A *tile* is the codes of 64 output channels and kInputs input channels, 512 bytes. Each lane has
// 16 of them: four words, each of which is the left fragment of one instruction (half_codes.cuh
// makes its registers). The bytes are the same in global memory (qtool/layouts/marlin.py,
// marlin_24.py).
//
// Legend: c = lane / 4, q = lane % 4; *outputs* and *inputs* are channels; sums [i][j][r] belong to
// block i of 8 tokens and to the fragment of word j, r as in half_mma.cuh.
#pragma once
#include "mma/half_mma.cuh"

// marlin: word j of a lane's 16 bytes of a tile has the codes of outputs 16 j + c and 16 j + c + 8,
// for the tile's inputs 2 q, 2 q + 1, 2 q + 8 and 2 q + 9.
template <int kKind>
struct Marlin {
    static constexpr int kInputs = 16;  // of a tile and of an instruction
    static constexpr bool kSparse = false;

    // Adds the products of the 32 inputs from 32 * pair on of a step, for all 64 outputs and
    // kBlocks blocks of 8 tokens. `codes`: this lane's 16 bytes of the step's first tile, and
    // row_bytes from a tile to that of the next inputs. `tokens`: [block][register], inputs 2 q,
    // 2 q + 1 of each 8 of the 32.
    template <int kBlocks>
    static __device__ __forceinline__ void multiply(float (&sums)[kBlocks][4][4], const u32 (&tokens)[kBlocks][4], const u8* codes,
                                                    int row_bytes, const u8*, int, int pair) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 packed = *reinterpret_cast<const uint4*>(codes + (2 * pair + half) * row_bytes);
            const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 a[4];
                dequantize<kKind>(words[j], a);
#pragma unroll
                for (int i = 0; i < kBlocks; ++i) multiply_add<kKind>(sums[i][j], a, tokens[i][2 * half], tokens[i][2 * half + 1]);
            }
        }
    }

    // Writes this lane's 8 sums of one token of a block to `row`, which is indexed by the output.
    // `second` picks the second of the lane's two tokens, 2 q + 1.
    static __device__ __forceinline__ void put(float* row, const float (&sums)[4][4], int second) {
        const int c = threadIdx.x % 32 / 4;
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int b = 0; b < 2; ++b) row[16 * j + 8 * b + c] = sums[j][2 * b + second];
    }

    // The place of the per-channel scale of output n: CHANNEL_ORDER of qtool/layouts/marlin.py.
    // With n = 32 j1 + 16 j0 + 8 b + 2 h + l it is 32 j1 + 8 h + 4 j0 + 2 b + l.
    static __device__ __forceinline__ int channel(int n) {
        return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 16 * 4 + n % 16 / 8 * 2 + n % 2;
    }
};

// marlin-24: word j of a lane's 16 bytes of a tile has the kept codes of outputs 8 c + j and
// 8 c + j + 4. Their positions lie in a tile of 256 bytes, two words a lane 128 bytes apart: word h
// serves j = 2 h in the lanes with q = 0 and 1, which selector 0 names, and j = 2 h + 1 in the
// others, selector 1. So one register serves two instructions.
template <int kKind>
struct Marlin24 {
    static constexpr int kInputs = 32;  // 16 of them kept
    static constexpr bool kSparse = true;

    // As of Marlin. `metadata`: this lane's first word of the step's first tile of positions, and
    // the bytes from a tile to that of the next inputs.
    template <int kBlocks>
    static __device__ __forceinline__ void multiply(float (&sums)[kBlocks][4][4], const u32 (&tokens)[kBlocks][4], const u8* codes,
                                                    int row_bytes, const u8* metadata, int metadata_row_bytes, int pair) {
        const uint4 packed = *reinterpret_cast<const uint4*>(codes + pair * row_bytes);
        const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
        const u32* positions = reinterpret_cast<const u32*>(metadata + pair * metadata_row_bytes);
        const u32 held[2] = {positions[0], positions[32]};  // 128 bytes apart
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            u32 a[4];
            dequantize<kKind>(words[j], a);
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                if (j % 2 == 0) multiply_add_sparse<kKind, 0>(sums[i][j], a, tokens[i], held[j / 2]);
                else multiply_add_sparse<kKind, 1>(sums[i][j], a, tokens[i], held[j / 2]);
            }
        }
    }

    // As of Marlin; here a lane's outputs are eight consecutive ones.
    static __device__ __forceinline__ void put(float* row, const float (&sums)[4][4], int second) {
        const int c = threadIdx.x % 32 / 4;
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int i = 2 * b + second;
            *reinterpret_cast<float4*>(row + 8 * c + 4 * b) = make_float4(sums[0][i], sums[1][i], sums[2][i], sums[3][i]);
        }
    }

    // The per-channel scales of marlin-24 keep their order.
    static __device__ __forceinline__ int channel(int n) { return n; }
};
