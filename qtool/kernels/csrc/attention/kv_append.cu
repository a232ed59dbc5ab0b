// New keys or values into the packed cache: one warp a token and head, eight channels a lane, nothing kept in between.
// kv4: s = max(0.95 (max - min) / 15, max|x| / 2^14), z = 7.5 - (max + min) / 2s in f16, code = clamp(rne(x / s + z), 0, 15);
// then all three again on the weighted least-squares line through the codes, three times or until that is no nearer;
// kv8: code = clamp(rne(x / s), -127, 127), s of the head and channel. The float32 operations are the scheme's, each
// rounded by itself, so that the bytes are the scheme's.
#include "attention/pages.cuh"
#include "common/element.cuh"

#if PAGED
struct Params {
    const void* x[2];         // keys and values [tokens, H, D] with strides, of DTYPE
    const float* channel[2];  // as below, of each
    const float* offset;      // [H, D], taken from the keys first, or null
    const long long* slots;   // [tokens] page * 64 + token in it; below 0: not stored
    u8* pages;                // [pages, H, kPageHead], page_stride apart
    long long stride[2][2];   // of keys and of values, in elements: token, head
    long long page_stride;    // bytes
    int warps, heads, tokens, pages_held;
};
#else
struct Params {
    const void* x;        // [B, H, new tokens, D] with strides, of DTYPE
    u8* codes;            // [B, H, capacity, token bytes]
    const float* channel;  // [H, D]; kv8: scales; kv4: what squared errors count, or null: all alike
    u16 *scale, *zero;    // kv4: f16 [B, H, capacity]
    const int* lengths;   // [B] tokens of each sequence, the new ones included, or null: all have `tokens`
    long long stride[3];  // of x, in elements: batch, head, token
    int warps, heads, added, tokens, capacity;
};
#endif

// Where a token of a head comes from, and where it goes.
struct Place {
    const Element* x;
    const float *channel, *offset;  // of the head, or null
    u8* codes;
    u16 *scale, *zero;
};

#if PAGED
// False for a token that is not stored.
__device__ __forceinline__ bool find(const Params& p, int index, Place& at) {
    const int head = index % p.heads, token = index / p.heads % p.tokens, which = index / p.heads / p.tokens;
    const long long slot = p.slots[token];
    if (slot < 0 || slot >= static_cast<long long>(p.pages_held) * kPageTokens) return false;
    const int within = static_cast<int>(slot % kPageTokens);
    u8* const part = p.pages + slot / kPageTokens * p.page_stride + static_cast<u64>(head) * kPageHead;
    at.x = static_cast<const Element*>(p.x[which]) + token * p.stride[which][0] + head * p.stride[which][1];
    at.channel = p.channel[which] ? p.channel[which] + head * DIM : nullptr;
    at.offset = which == 0 && p.offset ? p.offset + head * DIM : nullptr;
    at.codes = part + which * kPageCodes + within * (DIM * BITS / 8);
    at.scale = reinterpret_cast<u16*>(part + 2 * kPageCodes) + 2 * which * kPageTokens + within;
    at.zero = at.scale + kPageTokens;
    return true;
}
#else
__device__ __forceinline__ bool find(const Params& p, int index, Place& at) {
    const int token = index % p.added, head = index / p.added % p.heads, batch = index / p.added / p.heads;
    const int length = p.lengths ? p.lengths[batch] : p.tokens;
    const int row = length - p.added + token;
    if (row < 0 || row >= p.capacity) return false;
    const u64 to = (static_cast<u64>(batch) * p.heads + head) * p.capacity + row;
    at.x = static_cast<const Element*>(p.x) + batch * p.stride[0] + head * p.stride[1] + token * p.stride[2];
    at.channel = p.channel ? p.channel + head * DIM : nullptr;
    at.offset = nullptr;
    at.codes = p.codes + to * (DIM * BITS / 8);
    at.scale = p.scale + to, at.zero = p.zero + to;
    return true;
}
#endif

struct alignas(16) Eight {
    Element v[8];
};

__device__ __forceinline__ u16 to_half(float v) {
    u16 h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}
__device__ __forceinline__ float of_half(u16 h) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

__device__ __forceinline__ u16 stored(float scale) { return to_half(fminf(fmaxf(scale, 5.9604644775390625e-08f), 65504.f)); }

// Over the warp the sum of w value(i), by halves: first of the eight of a lane, then of the lanes. All lanes get the same bits.
template <class Value>
__device__ __forceinline__ float lane_sum(const float (&w)[8], Value value) {
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __fmul_rn(w[i], value(i));
    float sum = __fadd_rn(__fadd_rn(__fadd_rn(v[0], v[4]), __fadd_rn(v[2], v[6])),
                          __fadd_rn(__fadd_rn(v[1], v[5]), __fadd_rn(v[3], v[7])));
#pragma unroll
    for (int step = 16; step; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFF, sum, step));
    return sum;
}

struct Line {
    u16 scale, zero;
};
// Codes of a lane's eight values and what they leave; of a lane without channels nothing is left.
__device__ __forceinline__ void round_on(Line line, const float (&x)[8], bool active, float (&code)[8], float (&left)[8]) {
    const float scale = of_half(line.scale), zero = of_half(line.zero), inverse = __fdiv_rn(1.f, scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        code[i] = fminf(fmaxf(rintf(__fadd_rn(__fmul_rn(x[i], inverse), zero)), 0.f), 15.f);
        left[i] = active ? __fsub_rn(x[i], __fmul_rn(__fsub_rn(code[i], zero), scale)) : 0.f;
    }
}
__device__ __forceinline__ u32 packed(const float (&code)[8]) {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= static_cast<u32>(code[i]) << (4 * i);
    return word;
}

extern "C" __global__ void __launch_bounds__(128, 8) kv_append(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
    grid_wait();
    grid_release();
#endif
    const int index = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    Place at;
    if (index >= p.warps || !find(p, index, at)) return;
    const bool active = 8 * lane < DIM;
    float x[8];
    if (active) {
        const Eight values = *reinterpret_cast<const Eight*>(at.x + 8 * lane);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = widen(values.v[i]);
        if (at.offset)
#pragma unroll
            for (int i = 0; i < 8; ++i) x[i] = __fsub_rn(x[i], at.offset[8 * lane + i]);
    }

    if constexpr (BITS == 8) {
        if (!active) return;
        u32 packed[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float q = rintf(__fdiv_rn(x[i], at.channel[8 * lane + i]));
            const int code = static_cast<int>(fminf(fmaxf(q, -127.f), 127.f));
            packed[i / 4] |= (code & 0xFFu) << (8 * (i % 4));
        }
        *reinterpret_cast<uint2*>(at.codes + 8 * lane) = make_uint2(packed[0], packed[1]);
    } else {
        float low = __uint_as_float(0x7F800000), high = -low;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (!active) break;
            low = fminf(low, x[i]);
            high = fmaxf(high, x[i]);
        }
#pragma unroll
        for (int step = 16; step; step /= 2) {
            low = fminf(low, __shfl_xor_sync(0xFFFFFFFF, low, step));
            high = fmaxf(high, __shfl_xor_sync(0xFFFFFFFF, high, step));
        }
        const float widest = fmaxf(fabsf(low), fabsf(high)) * (1.f / 16384);
        const float step = fmaxf(__fmul_rn(__fsub_rn(high, low), static_cast<float>(0.95 / 15)), widest);
        Line line;
        line.scale = stored(step > 0.f ? step : 1.f);
        line.zero = to_half(__fsub_rn(7.5f, __fdiv_rn(__fmul_rn(__fadd_rn(low, high), 0.5f), of_half(line.scale))));
        float w[8], code[8], left[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (!active) x[i] = 0.f;
            w[i] = !active ? 0.f : at.channel ? at.channel[8 * lane + i] : 1.f;
        }
        round_on(line, x, active, code, left);
        const float n = lane_sum(w, [](int) { return 1.f; });
        float error = lane_sum(w, [&](int i) { return __fmul_rn(left[i], left[i]); });
#pragma unroll 1
        for (int round = 0; round < 3; ++round) {
            const float first = lane_sum(w, [&](int i) { return code[i]; });
            const float second = lane_sum(w, [&](int i) { return __fmul_rn(code[i], code[i]); });
            const float total = lane_sum(w, [&](int i) { return left[i]; });
            const float along = lane_sum(w, [&](int i) { return __fmul_rn(code[i], left[i]); });
            const float spread = __fsub_rn(__fmul_rn(second, n), __fmul_rn(first, first));
            const float slope = __fsub_rn(__fmul_rn(along, n), __fmul_rn(first, total));
            const float more = spread > 0.f ? __fdiv_rn(slope, spread) : 0.f;
            const float at_zero = __fdiv_rn(__fsub_rn(total, __fmul_rn(more, first)), n), scale = of_half(line.scale);
            Line moved;
            moved.scale = stored(__fadd_rn(scale, more));
            moved.zero =
                to_half(__fdiv_rn(__fsub_rn(__fmul_rn(of_half(line.zero), scale), at_zero), of_half(moved.scale)));
            float again[8], left_again[8];
            round_on(moved, x, active, again, left_again);
            const float less = lane_sum(w, [&](int i) { return __fmul_rn(left_again[i], left_again[i]); });
            if (!(less < error)) break;
            line = moved, error = less;
#pragma unroll
            for (int i = 0; i < 8; ++i) code[i] = again[i], left[i] = left_again[i];
        }
        if (lane == 0) *at.scale = line.scale, *at.zero = line.zero;
        if (active) *reinterpret_cast<u32*>(at.codes + 4 * lane) = packed(code);
    }
}
