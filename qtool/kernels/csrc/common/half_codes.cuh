// 4-bit codes as 16-bit operands of the tensor cores (MARLIN section 3.4, "Dequantization and
// Tensor Cores"). A register holds two 16-bit numbers, and all operations here act on both.
//
// The trick: if a 16-bit number 2^m has its lowest mantissa bit worth 1, then OR-ing a 4-bit code
// into its lowest bits gives 2^m + code, without an integer conversion. One multiply-add removes
// 2^m, and the zero point 8 with it. All of these numbers are exact in 16 bits.
#pragma once
#include "common/convert.cuh"

// (w & mask) | magic: the bits of `mask` become mantissa bits of the numbers in `magic`. lop3's
// truth table (PTX ISA, "lop3") is the operation itself on 0xF0, 0xCC, 0xAA:
// (0xF0 & 0xCC) | 0xAA = 0xEA.
__device__ __forceinline__ u32 into_mantissa(u32 w, u32 mask, u32 magic) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(w), "r"(mask), "r"(magic));
    return r;
}
// a * factor + addend, rounded once; kKind is kFloat16 or kBfloat16 here and below.
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

// Eight codes of `w` minus 8, exactly, as the A fragment of mma.m16n8k16 (or the kept half of that
// of mma.sp.m16n8k32). Nibble i, counted from the lowest, of the low and of the high 16 bits of `w`
// are the low and the high number of one register: nibbles 0, 1, 2, 3 are a[0], a[2], a[1], a[3],
// the order in which marlin and marlin-24 store them (qtool/layouts/marlin.py).
template <int kKind>
__device__ __forceinline__ void dequantize(u32 w, u32 (&a)[4]) {
    if constexpr (kKind == kBfloat16) {
        // 128 + code, then times 1 and minus 136. A bfloat16 has 7 mantissa bits: a nibble at bits
        // 4 to 7 would reach into the exponent, so every nibble is shifted down to bits 0 to 3
        // first.
        constexpr u32 kLow = 0x000F000F, k128 = 0x43004300, kOne = 0x3F803F80, kMinus136 = 0xC308C308;
        a[0] = scale_and_add<kKind>(into_mantissa(w, kLow, k128), kOne, kMinus136);
        a[2] = scale_and_add<kKind>(into_mantissa(w >> 4, kLow, k128), kOne, kMinus136);
        a[1] = scale_and_add<kKind>(into_mantissa(w >> 8, kLow, k128), kOne, kMinus136);
        a[3] = scale_and_add<kKind>(into_mantissa(w >> 12, kLow, k128), kOne, kMinus136);
    } else {
        // 1024 + code, then times 1 and minus 1032; or, from a nibble at bits 4 to 7 of float16's
        // 10 mantissa bits, 1024 + 16 code, then times 1/16 (64 + code) and minus 72. So one shift
        // serves two nibbles.
        constexpr u32 kLow = 0x000F000F, kHigh = 0x00F000F0, k1024 = 0x64006400;
        constexpr u32 kOne = 0x3C003C00, kMinus1032 = 0xE408E408, kSixteenth = 0x2C002C00, kMinus72 = 0xD480D480;
        a[0] = scale_and_add<kKind>(into_mantissa(w, kLow, k1024), kOne, kMinus1032);
        a[2] = scale_and_add<kKind>(into_mantissa(w, kHigh, k1024), kSixteenth, kMinus72);
        a[1] = scale_and_add<kKind>(into_mantissa(w >> 8, kLow, k1024), kOne, kMinus1032);
        a[3] = scale_and_add<kKind>(into_mantissa(w >> 8, kHigh, k1024), kSixteenth, kMinus72);
    }
}
