// What the host passes to an mma.sync GEMM; `qtool/kernels/mma/gemm.py` packs the same fields in the same order.
#pragma once
#include "common/ptx.cuh"

struct MmaParams {
    const u8* tokens;          // s8 [M, K], s4 [M, K/2], mixed [M, K]
    const u8* qweight;         // in its layout
    const u8* scale2;          // W4A8 level 2: [G, N]
    const u8* offset2;         // LiquidQuant a = 128 + lo, QoQ zero point: [G, N]
    const void* scale1;        // [N], or of groups [G, N]
    const u8* zero1;           // [N], QoQ per channel, else null
    const void* bias;          // [N] of `bias_kind`, or null
    const float* token_scale;  // [M], or of groups [G, M rounded up to 4]
    const int* token_sum;      // [M] sums of the tokens (QoQ per channel)
    const u8* eight_bit;       // [K/128], 1 where the tokens of a block have 8 bits (mixed)
    void* out;                 // [M, N]
    u32* partial;              // [blocks][sums of a thread][threads]
    u32* ready;                // [blocks], zeros: a block's partial sums are written
    int m, n, k;
    int scale1_kind, bias_kind;
    int token_tiles, tiles;
};
