// The kinds of floating-point numbers that tensors hold, and their conversion from and to float.
#pragma once
#include "common/ptx.cuh"

enum Kind { kFloat32 = 0, kFloat16 = 1, kBfloat16 = 2, kInt32 = 3 };

__device__ __forceinline__ float half_as_float(u16 h, int kind) {
    if (kind == kBfloat16) return __uint_as_float(static_cast<u32>(h) << 16);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}

// In two parts, so that several loads can be under way before the first conversion waits for its own.
__device__ __forceinline__ u32 load_bits(const void* p, int i, int kind) {
    return kind == kFloat32 ? static_cast<const u32*>(p)[i] : static_cast<const u16*>(p)[i];
}
__device__ __forceinline__ float as_float(u32 bits, int kind) {
    return kind == kFloat32 ? __uint_as_float(bits) : half_as_float(bits, kind);
}
__device__ __forceinline__ float load_as_float(const void* p, int i, int kind) { return as_float(load_bits(p, i, kind), kind); }

template <int kKind>
__device__ __forceinline__ u32 pack_pair(float first, float second) {
    u32 r;
    if constexpr (kKind == kBfloat16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(second), "f"(first));
    return r;
}
