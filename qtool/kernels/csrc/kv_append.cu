// New keys or values into the packed cache: one warp a token and head, eight channels a lane, nothing kept in between.
// kv4: s = max((max - min) / 15, max|x| / 2^14), z = -min / s in f16, code = clamp(rne(x / s + z), 0, 15);
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

extern "C" __global__ void __launch_bounds__(128) kv_append(const __grid_constant__ Params p) {
#if __CUDA_ARCH__ >= 900
    grid_release();
    grid_wait();
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
        const float step = fmaxf(__fdiv_rn(__fsub_rn(high, low), 15.f), widest);
        const u16 scale = to_half(step > 0.f ? fminf(fmaxf(step, 5.9604644775390625e-08f), 65504.f) : 1.f);
        const u16 zero = to_half(__fdiv_rn(-low, of_half(scale)));
        if (lane == 0) p.scale[row] = scale, p.zero[row] = zero;
        if (!active) return;
        u32 packed = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float q = rintf(__fadd_rn(__fdiv_rn(widen(values.v[i]), of_half(scale)), of_half(zero)));
            packed |= static_cast<u32>(fminf(fmaxf(q, 0.f), 15.f)) << (4 * i);
        }
        *reinterpret_cast<u32*>(p.codes + row * (DIM / 2) + 4 * lane) = packed;
    }
}
