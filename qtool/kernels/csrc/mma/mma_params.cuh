// The parameters of the integer mma.sync GEMMs (mma_gemm.cuh). `qtool/kernels/mma/gemm.py` packs
// the same fields in the same order. A kernel reads those of its scheme.
//
// Legend: M tokens, N output channels, K input channels, G groups of K that have their own scales.
#pragma once
#include "common/ptx.cuh"

struct MmaParams {
    const u8* tokens;          // bytes [M, K] (W4A8), nibbles [M, K/2] (W4A4), either [M, K] (W4Ax)
    const u8* qweight;         // 4-bit codes in the kernel's layout
    const u8* scale2;          // W4A8 level 2: [G, N] in the order of compute-aware
    const u8* offset2;         // the same; LiquidQuant's a = 128 + lo, QoQ's zero point
    const void* scale1;        // of `scale1_kind`: [N], or [G, N] if the s4 kernel scales groups
    const u8* zero1;           // [N], QoQ per channel
    const void* bias;          // [N] of `bias_kind`, or null
    const float* token_scale;  // [M]; s4 kernel: [M rounded up to 4], or [G, M rounded up to 4]
    const int* token_sum;      // [M] sum over K of each token's codes, QoQ per channel
    const u8* eight_bit;       // [K/128], W4Ax: 1 where the tokens have 8 bits
    void* out;                 // [M, N] of the kernel's kOut
    u32* partial;              // [grid][sums of a thread][threads], of a tile that another stores
    u32* ready;                // [grid], 0 at the start, 1 when the block's `partial` is written
    int m, n, k;
    int scale1_kind, bias_kind;  // enum Kind
    int token_tiles, tiles;      // tiles along M; in all
};
