// Quantizes new keys or values into the packed cache: an item is a token of a head, and a lane has
// sixteen of its channels. kv4: s = max(0.95 (max - min) / 15, max|x| / 2^14),
// z = 7.5 - (max + min) / 2s in f16, code = clamp(rne(x / s + z), 0, 15); then all three again on
// the weighted least-squares line through the codes, three times or until that is no nearer; kv8:
// code = clamp(rne(x / s), -127, 127), s of the head and channel. The float32 operations are the
// scheme's, each rounded by itself, so that the bytes are the scheme's.
#include "attention/pages.cuh"
#include "common/element.cuh"

#if PAGED
struct Params {
    const void* x[2];         // keys and values [tokens, H, D] with strides, of DTYPE
    const float* channel[2];  // as below, of keys and of values
    const float* offset;      // [H, D], subtracted from the keys first, or null
    const long long* slots;   // [tokens] page * 64 + token in it; below 0: not stored
    u8* pages;                // [pages, H, kPageHead], page_stride apart
    long long stride[2][2];   // of keys and of values, in elements: token, head
    long long page_stride;    // bytes
    int items, heads, tokens, pages_held;
};
#else
struct Params {
    const void* x;        // [B, H, new tokens, D] with strides, of DTYPE
    u8* codes;            // [B, H, capacity, token bytes]
    const float* channel;  // [H, D]; kv8: scales; kv4: weights of squared errors, or null: all 1
    u16 *scale, *zero;    // kv4: f16 [B, H, capacity]
    const int* lengths;   // [B] tokens of each sequence, new ones included, or null: `tokens`
    long long stride[3];  // of x, in elements: batch, head, token
    int items, heads, added, tokens, capacity;
};
#endif

// Channels are grouped by eights. A lane has an eight and another one that is half of all eights
// (padding included) further on: sums are taken by halves, so that a lane makes the first halving
// by itself.
constexpr int kEights = DIM > 128 ? 32 : DIM > 64 ? 16 : DIM > 32 ? 8 : DIM > 16 ? 4 : 2;
constexpr int kLanes = kEights / 2;      // of an item
constexpr int kItems = 32 / kLanes;      // of a warp
constexpr int kHeld = 16;                // channels of a lane
constexpr u32 kAll = 0xFFFFFFFF;
__device__ __forceinline__ int channel_of(int half) { return 8 * (threadIdx.x % kLanes + half * kLanes); }

// The source and the destination of a token of a head.
struct Place {
    const Element* x;
    const float *channel, *offset;  // of the head, or null
    u8* codes;
    u16 *scale, *zero;
};

#if PAGED
// False for a token that is not stored.
__device__ __forceinline__ bool find(const Params& p, int index, Place& at) {
    const int token = index % p.tokens, head = index / p.tokens % p.heads, which = index / p.tokens / p.heads;
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

template <class Value>
struct alignas(16) Eight {
    Value v[8];
};

__device__ __forceinline__ u16 to_half(float v) { return float_as_half<kFloat16>(v); }
__device__ __forceinline__ float of_half(u16 h) { return half_as_float(h, kFloat16); }

// A scale in f16: positive and finite.
__device__ __forceinline__ u16 stored(float scale) { return to_half(fminf(fmaxf(scale, 5.9604644775390625e-08f), 65504.f)); }

// The sum of value(i) over an item, by halves: within each eight, then of the eights. All its lanes
// get the same bits.
template <class Value>
__device__ __forceinline__ float item_sum(Value value) {
    float v[kHeld];
#pragma unroll
    for (int i = 0; i < kHeld; ++i) v[i] = value(i);
#pragma unroll
    for (int step = 4; step; step /= 2)
#pragma unroll
        for (int i = 0; i < step; ++i) v[i] = __fadd_rn(v[i], v[i + step]), v[8 + i] = __fadd_rn(v[8 + i], v[8 + i + step]);
    float sum = __fadd_rn(v[0], v[8]);
#pragma unroll
    for (int step = kLanes / 2; step; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(kAll, sum, step));
    return sum;
}

// kv4's scale and zero point of an item, in f16: code c stands for scale * (c - zero).
struct Line {
    u16 scale, zero;
};
// A lane's part of an item: its values, and the weights of their squared errors (1 if not
// WEIGHTED); 0 beyond the channels.
template <bool WEIGHTED>
struct Part {
    float x[kHeld], w[WEIGHTED ? kHeld : 1], n;  // n: the sum of the item's weights
    bool active[2];                              // whether each of the lane's eights has channels

    // The weighted sum of value(i) over the item.
    template <class Value>
    __device__ __forceinline__ float sum(Value value) const {
        if constexpr (WEIGHTED) return item_sum([&](int i) { return __fmul_rn(w[i], value(i)); });
        return item_sum([&](int i) { return DIM == 8 * kEights || active[i / 8] ? value(i) : 0.f; });
    }
    // Reads the channels' weights, all 1 if null, and adds them up.
    __device__ __forceinline__ void weigh(const float* weights) {
        if constexpr (WEIGHTED) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 8; ++i) w[8 * half + i] = active[half] ? 1.f : 0.f;
                if (!active[half] || !weights) continue;
                const auto all = *reinterpret_cast<const Eight<float>*>(weights + channel_of(half));
#pragma unroll
                for (int i = 0; i < 8; ++i) w[8 * half + i] = all.v[i];
            }
            n = item_sum([&](int i) { return w[i]; });
        } else {
            n = DIM;
        }
    }
    // The codes of x on a line, as floats, and what is left: x - scale * (code - zero).
    __device__ __forceinline__ void round_on(Line line, float (&code)[kHeld], float (&left)[kHeld]) const {
        // 1.5 * 2^23: floats of this size are integers, so adding it rounds to one (half to even).
        constexpr float kInteger = 12582912.f;
        const float scale = of_half(line.scale), zero = of_half(line.zero), inverse = __fdiv_rn(1.f, scale);
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            const float place = fminf(fmaxf(__fadd_rn(__fmul_rn(x[i], inverse), zero), 0.f), 15.f);
            code[i] = __fsub_rn(__fadd_rn(place, kInteger), kInteger);
            left[i] = __fsub_rn(x[i], __fmul_rn(__fsub_rn(code[i], zero), scale));
        }
    }
    // Finds the line: first by the range, then refitted by weighted least squares of the residuals
    // over the codes, as the first comment says. An item whose error has stopped falling keeps its
    // line while others of the warp go on.
    __device__ __forceinline__ Line line() const {
        float low = __uint_as_float(0x7F800000), high = -low;
#pragma unroll
        for (int i = 0; i < kHeld; ++i) {
            if (!active[i / 8]) continue;
            low = fminf(low, x[i]);
            high = fmaxf(high, x[i]);
        }
#pragma unroll
        for (int step = kLanes / 2; step; step /= 2) {
            low = fminf(low, __shfl_xor_sync(kAll, low, step));
            high = fmaxf(high, __shfl_xor_sync(kAll, high, step));
        }
        const float widest = fmaxf(fabsf(low), fabsf(high)) * (1.f / 16384);
        const float step = fmaxf(__fmul_rn(__fsub_rn(high, low), static_cast<float>(0.95 / 15)), widest);
        Line line;
        line.scale = stored(step > 0.f ? step : 1.f);
        line.zero = to_half(__fsub_rn(7.5f, __fdiv_rn(__fmul_rn(__fadd_rn(low, high), 0.5f), of_half(line.scale))));
        float code[kHeld], left[kHeld];
        round_on(line, code, left);
        float error = sum([&](int i) { return __fmul_rn(left[i], left[i]); });
        bool done = false;
#pragma unroll 1
        for (int round = 0; round < 3; ++round) {
            const float first = sum([&](int i) { return code[i]; });
            const float second = sum([&](int i) { return __fmul_rn(code[i], code[i]); });
            const float total = sum([&](int i) { return left[i]; });
            const float along = sum([&](int i) { return __fmul_rn(code[i], left[i]); });
            const float spread = __fsub_rn(__fmul_rn(second, n), __fmul_rn(first, first));
            const float slope = __fsub_rn(__fmul_rn(along, n), __fmul_rn(first, total));
            const float more = spread > 0.f ? __fdiv_rn(slope, spread) : 0.f;
            const float at_zero = __fdiv_rn(__fsub_rn(total, __fmul_rn(more, first)), n), scale = of_half(line.scale);
            Line moved;
            moved.scale = stored(__fadd_rn(scale, more));
            moved.zero =
                to_half(__fdiv_rn(__fsub_rn(__fmul_rn(of_half(line.zero), scale), at_zero), of_half(moved.scale)));
            round_on(moved, code, left);
            const float less = sum([&](int i) { return __fmul_rn(left[i], left[i]); });
            done = done || !(less < error);
            if (__all_sync(kAll, done)) break;
            if (!done) line = moved, error = less;
        }
        return line;
    }
};

// Sixteen channels of the token, less the offset; 0 beyond the channels.
__device__ __forceinline__ void read(const Place& at, const bool (&active)[2], float (&x)[kHeld]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[8 * half + i] = 0.f;
        if (!active[half]) continue;
        const auto all = *reinterpret_cast<const Eight<Element>*>(at.x + channel_of(half));
#pragma unroll
        for (int i = 0; i < 8; ++i) x[8 * half + i] = widen(all.v[i]);
        if (!at.offset) continue;
        const auto offset = *reinterpret_cast<const Eight<float>*>(at.offset + channel_of(half));
#pragma unroll
        for (int i = 0; i < 8; ++i) x[8 * half + i] = __fsub_rn(x[8 * half + i], offset.v[i]);
    }
}

// Quantizes the lane's channels of an item and stores their codes.
#if BITS == 8
__device__ __forceinline__ void append(const Place& at, const bool (&active)[2]) {
    float x[kHeld];
    read(at, active, x);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!active[half]) continue;
        const auto scale = *reinterpret_cast<const Eight<float>*>(at.channel + channel_of(half));
        u32 packed[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float q = rintf(__fdiv_rn(x[8 * half + i], scale.v[i]));
            const int code = static_cast<int>(fminf(fmaxf(q, -127.f), 127.f));
            packed[i / 4] |= (code & 0xFFu) << (8 * (i % 4));
        }
        *reinterpret_cast<uint2*>(at.codes + channel_of(half)) = make_uint2(packed[0], packed[1]);
    }
}
#else
// All lanes of a warp run this, also those whose item is not stored.
template <bool WEIGHTED>
__device__ __forceinline__ void append(const Place& at, const bool (&active)[2]) {
    Part<WEIGHTED> part;
    part.active[0] = active[0], part.active[1] = active[1];
    read(at, active, part.x);
    part.weigh(at.channel);
    const Line line = part.line();
    float code[kHeld], left[kHeld];
    part.round_on(line, code, left);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        if (!active[half]) continue;
        u32 word = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) word |= (__float_as_uint(__fadd_rn(code[8 * half + i], 8388608.f)) & 15u) << (4 * i);
        *reinterpret_cast<u32*>(at.codes + channel_of(half) / 2) = word;
    }
    if (active[0] && channel_of(0) == 0) *at.scale = line.scale, *at.zero = line.zero;
}
#endif

extern "C" __global__ void __launch_bounds__(128, 4) kv_append(const __grid_constant__ Params p) {
    grid_wait();
    grid_release();
    const int index = (blockIdx.x * 4 + threadIdx.x / 32) * kItems + threadIdx.x % 32 / kLanes;
    Place at{};
    const bool stored = index < p.items && find(p, index, at);
    const bool active[2] = {stored && channel_of(0) < DIM, stored && channel_of(1) < DIM};
#if BITS == 8
    append(at, active);
#else
    if (__any_sync(kAll, stored && at.channel)) {
        append<true>(at, active);
    } else {
        append<false>(at, active);
    }
#endif
}
