// The number formats of tensors, and their conversion from and to float, which rounds to nearest
// even. Loads take the kind as an argument, since that of a scale or a bias may be known only at run
// time.
#pragma once
#include "common/ptx.cuh"

// The host's numbers of dtypes (NUMBERS in qtool/kernels/dtypes.py). kInt32 is a kind of outputs
// only: the sums of the codes' products, before any scale.
enum Kind { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kInt32 = 3 };

// `kind` is kFloat16 or kBfloat16. A bfloat16 is the upper half of a float32.
__device__ __forceinline__ float half_as_float(u16 h, int kind) {
    if (kind == kBfloat16) return __uint_as_float(static_cast<u32>(h) << 16);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
template <int kKind>
__device__ __forceinline__ u16 float_as_half(float v) {
    u16 h;
    if constexpr (kKind == kBfloat16) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(v));
    else asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
    return h;
}

// load_as_float reads item i of p. Its two parts, load_bits and as_float, can also be called apart:
// several loads are then under way before the first conversion waits for its own.
__device__ __forceinline__ u32 load_bits(const void* p, int i, int kind) {
    return kind == kFloat32 ? static_cast<const u32*>(p)[i] : static_cast<const u16*>(p)[i];
}
__device__ __forceinline__ float as_float(u32 bits, int kind) {
    return kind == kFloat32 ? __uint_as_float(bits) : half_as_float(bits, kind);
}
__device__ __forceinline__ float load_as_float(const void* p, int i, int kind) { return as_float(load_bits(p, i, kind), kind); }

// Rounds two floats at once; a conversion of one takes four times as long. `first` goes to the low
// half. cvt takes the high half first.
template <int kKind>
__device__ __forceinline__ u32 pack_pair(float first, float second) {
    u32 r;
    if constexpr (kKind == kBfloat16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}
