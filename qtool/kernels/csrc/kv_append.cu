// New keys or values into the packed cache: one warp a token and head, eight channels a lane, nothing kept in between.
// kv4: s = max(0.95 (max - min) / 15, max|x| / 2^14), z = 7.5 - (max + min) / 2s in f16, code = clamp(rne(x / s + z), 0, 15);
// then all three once more on the least-squares line through the codes, if that is nearer;
// kv8: code = clamp(rne(x / s), -127, 127), s of the head and channel. The float32 operations are the scheme's, each
// rounded by itself, so that the bytes are the scheme's.
#include "element.cuh"

struct Params {
    const void* x;        // [B, H, new tokens, D] with strides, of DTYPE
    u8* codes;            // [B, H, capacity, token bytes]
    const float* channel_scale;  // kv8: [H, D]
    u16 *scale, *zero;    // kv4: f16 [B, H, capacity]
    const int* lengths;   // [B] tokens of each sequence, the new ones included, or null: all have `tokens`
    long long stride[3];  // of x, in elements: batch, head, token
    int warps, heads, added, tokens, capacity;
};

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

// Over the warp, by halves: first of the eight values of a lane, then of the lanes. All lanes get the same bits.
__device__ __forceinline__ float lane_sum(const float (&v)[8]) {
    float sum = __fadd_rn(__fadd_rn(__fadd_rn(v[0], v[4]), __fadd_rn(v[2], v[6])),
                          __fadd_rn(__fadd_rn(v[1], v[5]), __fadd_rn(v[3], v[7])));
#pragma unroll
    for (int step = 16; step; step /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(0xFFFFFFFF, sum, step));
    return sum;
}
__device__ __forceinline__ float squares(const float (&v)[8]) {
    float square[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) square[i] = __fmul_rn(v[i], v[i]);
    return lane_sum(square);
}

struct Line {
    u16 scale, zero;
};
// Codes of a lane's eight values, a nibble each, and what they leave; of a lane without channels nothing is left.
__device__ __forceinline__ u32 rounded_on(Line line, const float (&x)[8], bool active, float (&left)[8]) {
    const float scale = of_half(line.scale), zero = of_half(line.zero);
    u32 packed = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float code = fminf(fmaxf(rintf(__fadd_rn(__fdiv_rn(x[i], scale), zero)), 0.f), 15.f);
        packed |= static_cast<u32>(code) << (4 * i);
        left[i] = active ? __fsub_rn(x[i], __fmul_rn(__fsub_rn(code, zero), scale)) : 0.f;
    }
    return packed;
}

extern "C" __global__ void __launch_bounds__(128) kv_append(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
    grid_wait();
    grid_release();
#endif
    const int index = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (index >= p.warps) return;
    const int token = index % p.added, head = index / p.added % p.heads, batch = index / p.added / p.heads;
    const int length = p.lengths ? p.lengths[batch] : p.tokens;
    const int at = length - p.added + token;
    if (at < 0 || at >= p.capacity) return;
    const u64 row = (static_cast<u64>(batch) * p.heads + head) * p.capacity + at;
    const Element* const x =
        static_cast<const Element*>(p.x) + batch * p.stride[0] + head * p.stride[1] + token * p.stride[2];
    const bool active = 8 * lane < DIM;
    Eight values;
    if (active) values = *reinterpret_cast<const Eight*>(x + 8 * lane);

    if constexpr (BITS == 8) {
        if (!active) return;
        u32 packed[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float q = rintf(__fdiv_rn(widen(values.v[i]), p.channel_scale[head * DIM + 8 * lane + i]));
            const int code = static_cast<int>(fminf(fmaxf(q, -127.f), 127.f));
            packed[i / 4] |= (code & 0xFFu) << (8 * (i % 4));
        }
        *reinterpret_cast<uint2*>(p.codes + row * DIM + 8 * lane) = make_uint2(packed[0], packed[1]);
    } else {
        float low = __uint_as_float(0x7F800000), high = -low;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (!active) break;
            low = fminf(low, widen(values.v[i]));
            high = fmaxf(high, widen(values.v[i]));
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
        float x[8], left[8], weighted[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] = active ? widen(values.v[i]) : 0.f;
        u32 packed = rounded_on(line, x, active, left);

        int first = 0, second = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int code = active ? packed >> (4 * i) & 15 : 0;
            first += code, second += code * code;
            weighted[i] = __fmul_rn(code, left[i]);
        }
        first = __reduce_add_sync(0xFFFFFFFF, first), second = __reduce_add_sync(0xFFFFFFFF, second);
        const float spread = second * DIM - first * first, total = lane_sum(left), along = lane_sum(weighted);
        const float slope = __fsub_rn(__fmul_rn(along, DIM), __fmul_rn(first, total));
        const float more = spread > 0.f ? __fdiv_rn(slope, spread) : 0.f;
        const float at_zero = __fmul_rn(__fsub_rn(total, __fmul_rn(more, first)), static_cast<float>(1. / DIM));
        const float scale = of_half(line.scale);
        Line refit;
        refit.scale = stored(__fadd_rn(scale, more));
        refit.zero = to_half(__fdiv_rn(__fsub_rn(__fmul_rn(of_half(line.zero), scale), at_zero), of_half(refit.scale)));
        float still_left[8];
        const u32 again = rounded_on(refit, x, active, still_left);
        if (squares(still_left) < squares(left)) line = refit, packed = again;
        if (lane == 0) p.scale[row] = line.scale, p.zero[row] = line.zero;
        if (active) *reinterpret_cast<u32*>(p.codes + row * (DIM / 2) + 4 * lane) = packed;
    }
}
