// Element: an item of a tensor of the dtype that the kernel is compiled for. The host defines
// DTYPE: 0 float32, 1 float16, 2 bfloat16 (qtool/kernels/dtypes.py). 16-bit items are kept as their
// bits; widen and narrow convert them to float and, rounding to nearest even, back.
#pragma once
#include "common/ptx.cuh"

#if DTYPE == 0
typedef float Element;
__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float narrow(float v) { return v; }
#else
typedef u16 Element;
__device__ __forceinline__ float widen(u16 h) {
#if DTYPE == 2
    return __uint_as_float(static_cast<u32>(h) << 16);  // bfloat16 is the upper half of float32
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
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
#endif

// Two values at once, since a conversion of one value to 16 bits takes four times as long as that
// of a pair. narrow_pair puts `first` into the low half; round_pair rounds two floats to what an
// Element can hold, and leaves them floats.
#if DTYPE == 0
__device__ __forceinline__ void round_pair(float&, float&) {}
#else
__device__ __forceinline__ u32 narrow_pair(float first, float second) {
    u32 both;
#if DTYPE == 2
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
#endif
    return both;
}
__device__ __forceinline__ void round_pair(float& first, float& second) {
    const u32 both = narrow_pair(first, second);
    first = widen(static_cast<u16>(both)), second = widen(static_cast<u16>(both >> 16));
}
#endif
