// The weight operand of the 16-bit GEMMs: what a warp's 64 output channels look like in shared memory, and their
// products with blocks of tokens. The codes are the tensor cores' left operand.
//
// Legend: c = lane / 4, q = lane % 4. A *row* is one 16-byte load a lane: 512 bytes, kInputs input channels.
#pragma once
#include "mma/half_mma.cuh"

// MARLIN: word j of a row is the fragment of outputs 16 j + c, + 8 and of 16 inputs.
template <int kKind>
struct Marlin {
    static constexpr int kInputs = 16;
    static constexpr bool kSparse = false;

    // Inputs 32 pair .. + 31 of a step, all 64 outputs, `kBlocks` blocks of 8 tokens.
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

    // A token's sums of this lane, to `row`[output]; `second` picks the second of the lane's two tokens.
    static __device__ __forceinline__ void put(float* row, const float (&sums)[4][4], int second) {
        const int c = threadIdx.x % 32 / 4;
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int b = 0; b < 2; ++b) row[16 * j + 8 * b + c] = sums[j][2 * b + second];
    }

    // Where the per-channel scale of output n lies: the order of MARLIN's accumulators.
    static __device__ __forceinline__ int channel(int n) {
        return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 16 * 4 + n % 16 / 8 * 2 + n % 2;
    }
};

// marlin-24: word j of a row is the kept half of outputs 8 c + j, + 4 and of 32 inputs. The positions of j = 2 r, 2 r + 1
// are the lanes' r-th words, for the selectors 0 and 1.
template <int kKind>
struct Marlin24 {
    static constexpr int kInputs = 32;
    static constexpr bool kSparse = true;

    template <int kBlocks>
    static __device__ __forceinline__ void multiply(float (&sums)[kBlocks][4][4], const u32 (&tokens)[kBlocks][4], const u8* codes,
                                                    int row_bytes, const u8* metadata, int metadata_row_bytes, int pair) {
        const uint4 packed = *reinterpret_cast<const uint4*>(codes + pair * row_bytes);
        const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
        const u32* positions = reinterpret_cast<const u32*>(metadata + pair * metadata_row_bytes);
        const u32 held[2] = {positions[0], positions[32]};
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

    static __device__ __forceinline__ void put(float* row, const float (&sums)[4][4], int second) {
        const int c = threadIdx.x % 32 / 4;
#pragma unroll
        for (int b = 0; b < 2; ++b) {
            const int i = 2 * b + second;
            *reinterpret_cast<float4*>(row + 8 * c + 4 * b) = make_float4(sums[0][i], sums[1][i], sums[2][i], sums[3][i]);
        }
    }

    static __device__ __forceinline__ int channel(int n) { return n; }
};
