// The parameters that the host passes to the attention kernels; `qtool/kernels/attention/kv_attention.py` packs the same fields in the same order.
#pragma once
#include "common/ptx.cuh"

struct Params {
    const u16* query;    // [B, Hkv, rows, D], rows = group x queries; sequences query_stride apart
    const u8* k_codes;   // [B, Hkv, capacity, token bytes]
    const void* k_scale;  // kv4: f16 [B, Hkv, capacity]; kv8: float [Hkv, D]
    const u16* k_zero;   // kv4: f16 [B, Hkv, capacity]
    const u8* v_codes;
    const void* v_scale;
    const u16* v_zero;
    const int* lengths;  // [B] tokens of each sequence, or null: all have `tokens`
    const u8* mask;      // [B, queries, mask_tokens], 0 hides; tokens beyond it are hidden too
    u16* out;            // [B, Hkv, rows, D]
    float* partial;      // several splits: [B Hkv rows, splits, 2] maximum (base 2) and sum, then [.., splits, D]
    const int* table;    // paged: [B, table_stride] the page of each 64 tokens; k_codes are the pages then
    const float* shift;  // paged: added to every (scaled) score of a row before the cap [B, Hkv, rows], or null: nothing
    long long query_stride, page_stride;  // elements from sequence to sequence; bytes from page to page
    // paged: the number of splits that take part keeps each below LONGEST rounds of tiles; it is at least `fewest`
    float scaling, softcap;
    int heads, group, queries, tokens, capacity, mask_tokens, splits, row_tiles, window, all_rows, table_stride, fewest;
};

constexpr float kLog2e = 1.4426950408889634f;

constexpr float kNone = -1e30f;  // the maximum of no token: finite, so that differences are numbers

__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// One element of the query's and the output's dtype: 1 float16, 2 bfloat16.
__device__ __forceinline__ float widen(u32 h) {
#if DTYPE == 2
    return __uint_as_float(h << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(static_cast<u16>(h)));
    return f;
#endif
}
__device__ __forceinline__ u16 narrow(float v) {
    u16 h;
#if DTYPE == 2
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
#endif
    return h;
}
