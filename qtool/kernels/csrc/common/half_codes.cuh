// 4-bit codes -> 16-bit operands of the tensor cores (MARLIN section 3.4, "Dequantization and Tensor Cores").
#pragma once
#include "common/convert.cuh"

// (w & mask) | magic: codes become the low mantissa bits of 16-bit numbers.
__device__ __forceinline__ u32 into_mantissa(u32 w, u32 mask, u32 magic) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(w), "r"(mask), "r"(magic));
    return r;
}
template <int kKind>
__device__ __forceinline__ u32 scale_and_add(u32 a, u32 factor, u32 addend) {
    u32 r;
    if constexpr (kKind == kBfloat16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(factor), "r"(addend));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(factor), "r"(addend));
    return r;
}
template <int kKind>
__device__ __forceinline__ u32 multiply_pair(u32 a, u32 b) {
    u32 r;
    if constexpr (kKind == kBfloat16) asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    else asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// A word's eight codes minus 8, exact, as the A fragment of a 16 x 16 block. Nibbles 0..3 of each half word
// are its registers 0, 2, 1, 3.
template <int kKind>
__device__ __forceinline__ void dequantize(u32 w, u32 (&a)[4]) {
    if constexpr (kKind == kBfloat16) {  // 128 + code: bfloat16 has no mantissa bits above the low nibble's to spare
        constexpr u32 kLow = 0x000F000F, k128 = 0x43004300, kOne = 0x3F803F80, kMinus136 = 0xC308C308;
        a[0] = scale_and_add<kKind>(into_mantissa(w, kLow, k128), kOne, kMinus136);
        a[2] = scale_and_add<kKind>(into_mantissa(w >> 4, kLow, k128), kOne, kMinus136);
        a[1] = scale_and_add<kKind>(into_mantissa(w >> 8, kLow, k128), kOne, kMinus136);
        a[3] = scale_and_add<kKind>(into_mantissa(w >> 12, kLow, k128), kOne, kMinus136);
    } else {  // 1024 + code, or 1024 + 16 code
        constexpr u32 kLow = 0x000F000F, kHigh = 0x00F000F0, k1024 = 0x64006400;
        constexpr u32 kOne = 0x3C003C00, kMinus1032 = 0xE408E408, kSixteenth = 0x2C002C00, kMinus72 = 0xD480D480;
        a[0] = scale_and_add<kKind>(into_mantissa(w, kLow, k1024), kOne, kMinus1032);
        a[2] = scale_and_add<kKind>(into_mantissa(w, kHigh, k1024), kSixteenth, kMinus72);
        a[1] = scale_and_add<kKind>(into_mantissa(w >> 8, kLow, k1024), kOne, kMinus1032);
        a[3] = scale_and_add<kKind>(into_mantissa(w >> 8, kHigh, k1024), kSixteenth, kMinus72);
    }
}
