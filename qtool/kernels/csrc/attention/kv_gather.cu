// Gathers the keys and values that queries attend to, in DTYPE: the dequantized tokens of a paged
// cache, then the new tokens. A thread has eight channels of a token of a head; the float32
// operations are the scheme's, each rounded by itself.
#include "attention/pages.cuh"
#include "common/element.cuh"

constexpr int kPieces = DIM / 8;

struct Params {
    const void* x[2];        // new keys and values [tokens, H, D] with strides
    void* out[2];            // [total, H, D]
    const float* channel[2];  // [H, D]; kv8: scales; kv4: the keys' offset, and null
    const u8* pages;
    // Of n sequences: their pages [n, table_stride], their first rows of out [n + 1] and of x
    // [n + 1] and then the ends, and how many tokens of theirs are in the pages [n].
    const int *table, *starts, *fresh, *cached;
    long long stride[2][2];  // of x, in elements: token, head
    long long page_stride;
    int sequences, heads, total, table_stride, window;
};

struct alignas(16) Eight {
    Element v[8];
};

__device__ __forceinline__ float of_half(u16 h) { return half_as_float(h, kFloat16); }

extern "C" __global__ void __launch_bounds__(128) kv_gather(const __grid_constant__ Params p) {
    grid_wait();
    grid_release();
    const u32 index = blockIdx.x * 128 + threadIdx.x, heads = p.heads;
    const int piece = index % kPieces, head = index / kPieces % heads, which = index / kPieces / heads % 2;
    const int row = index / kPieces / heads / 2;
    if (row >= p.total) return;
    int sequence = 0;  // the last sequence that starts at this row or before
    for (int past = p.sequences; past - sequence > 1;) {
        const int middle = (sequence + past) / 2;
        (p.starts[middle] <= row ? sequence : past) = middle;
    }
    const int start = p.starts[sequence], token = row - start, cached = p.cached[sequence];
    const int fresh = p.fresh[sequence], queries = p.fresh[sequence + 1] - fresh;
    const int first = p.starts[sequence + 1] - start - queries;  // position of the first query
    Eight out;
    if (token >= cached) {  // the last of the new tokens are those beyond the cached ones
        const u64 from = fresh + token - first;
        out = *reinterpret_cast<const Eight*>(static_cast<const Element*>(p.x[which]) + from * p.stride[which][0] +
                                              head * p.stride[which][1] + 8 * piece);
    } else if (p.window && token <= first - p.window) {
        // No query sees this token, and its page may hold anything.
#pragma unroll
        for (int i = 0; i < 8; ++i) out.v[i] = narrow(0.f);
    } else {
        const int page = p.table[static_cast<u64>(sequence) * p.table_stride + token / kPageTokens], within = token % kPageTokens;
        const u8* const part = p.pages + page * p.page_stride + static_cast<u64>(head) * kPageHead;
        const u8* const codes = part + which * kPageCodes + within * (DIM * BITS / 8) + BITS * piece;
        const float* const channel = p.channel[which] ? p.channel[which] + head * DIM + 8 * piece : nullptr;
        if constexpr (BITS == 8) {
            const uint2 words = *reinterpret_cast<const uint2*>(codes);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const int code = static_cast<signed char>((i < 4 ? words.x : words.y) >> (8 * (i % 4)));
                out.v[i] = narrow(__fmul_rn(static_cast<float>(code), channel[i]));
            }
        } else {
            const u16* const line =
                reinterpret_cast<const u16*>(part + 2 * kPageCodes) + 2 * which * kPageTokens + within;
            const float scale = of_half(line[0]), zero = of_half(line[kPageTokens]);
            const u32 word = *reinterpret_cast<const u32*>(codes);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float value = __fmul_rn(__fsub_rn(static_cast<float>(word >> (4 * i) & 15), zero), scale);
                out.v[i] = narrow(channel ? __fadd_rn(value, channel[i]) : value);
            }
        }
    }
    *reinterpret_cast<Eight*>(static_cast<Element*>(p.out[which]) + (static_cast<u64>(row) * heads + head) * DIM + 8 * piece) = out;
}
