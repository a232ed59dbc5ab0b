// The parameters that the host passes to the attention kernels;
// `qtool/kernels/attention/kv_attention.py` packs the same fields in the same order.
//
// Legend: B sequences, Hkv kv heads, D head dimension, *capacity* tokens that a dense cache has
// room for.
#pragma once
#include "common/element.cuh"

struct Params {
    const u16* query;    // [B, Hkv, rows, D], rows = group x queries; sequences query_stride apart
    const u8* k_codes;   // [B, Hkv, capacity, token bytes]
    const void* k_scale;  // kv4: f16 [B, Hkv, capacity]; kv8: float [Hkv, D]
    const u16* k_zero;   // kv4: f16 [B, Hkv, capacity]
    const u8* v_codes;   // the same three of the values
    const void* v_scale;
    const u16* v_zero;
    const int* lengths;  // [B] tokens of each sequence, or null: all have `tokens`
    const u8* mask;      // [B, queries, mask_tokens], 0 hides; tokens beyond it are hidden too
    u16* out;            // [B, Hkv, rows, D]
    // If there are several splits, of each part [B Hkv rows, splits]: the maximum (base 2) and the
    // sum of the weights, then the weighted sums of the values [.., D].
    float* partial;
    const int* table;    // paged: [B, table_stride] the page of each 64 tokens
    const float* shift;  // paged: [B, Hkv, rows], added to a row's scores before the cap, or null
    long long query_stride, page_stride;  // elements between sequences; bytes between pages
    // paged: k_codes are the pages. `splits` parts are launched for every sequence. One is cut into
    // `fewest` parts, or into more (up to `splits`) where these would be longer than LONGEST rounds
    // of WARPS tiles.
    float scaling, softcap;
    int heads, group, queries, tokens, capacity, mask_tokens, splits, row_blocks, window, all_rows, table_stride, fewest;
};

constexpr float kLog2e = 1.4426950408889634f;

constexpr float kNone = -1e30f;  // the maximum of no token: finite, so that differences are numbers

// 2^x, approximately (PTX ISA, "ex2"); 0 for results below the normal numbers.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
