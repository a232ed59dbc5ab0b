// The parameters that the host passes to a GEMM; `qtool/kernels/hopper/gemm.py` packs the same
// fields in the same order.
//
// Legend: M tokens, N output channels, K input channels, G groups of K that have their own scales,
// E experts.
#pragma once
#include "common/ptx.cuh"

struct Params {
    TensorMap tokens;   // [M, K], int8 or 16 bits
    TensorMap weights;  // int8 [N, K] (W8A8), s4 codes (W4A4, W4Ax), marlin(-24) tiles (W4A16)
    const u8* qweight;  // dual-MMA tiles
    const u8* scale2;   // level 2: [N/64, G, 64]
    const u8* offset2;  // LiquidQuant a = 128 + lo, QoQ zero point: [N/64, G, 64]
    const void* scale1;  // [N] or [G, N], of `scale1_kind`
    const u8* zero1;     // [N], QoQ per channel, else null
    const void* bias;    // [N] of `bias_kind`, or null
    const float* token_scale;  // [M]; of s4 weights [G, M rounded up to 4]; null under 16-bit tokens
    const int* token_sum;      // [M] sums of the int8 tokens (4-bit weights)
    void* out;                 // [M, N]
    int m, n, k;
    int scale1_kind, bias_kind;
    int token_tiles, tiles;  // tiles = token_tiles * ceil(n / rows of a block)
    // Several weights in one, for the experts of a mixture; else unused.
    const int* offsets;    // [E + 1] first token of each expert, then the end of the last
    int experts, columns;  // E, and the output channels of each: n = experts * columns
    // W4A16, one weight as well: the output channels of a matrix of tiles. If there are several,
    // they follow one another.
    int part;
    TensorMap positions;   // of the weights that 2:4 sparsity keeps (marlin-24), else unused
};
