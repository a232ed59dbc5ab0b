// mma.sync of sm_80 and newer for 16-bit operands (PTX ISA, "mma" and "mma.sp"). The left operand
// `a` is the weight, the right one `b` tokens, and the sums `d` are float32. kKind: kFloat16 or
// kBfloat16, of both operands.
//
// With c = lane / 4 and q = lane % 4 a lane holds, two adjacent inputs in a register,
//   a[0], a[1]  rows c and c + 8, inputs 2 q and 2 q + 1;    a[2], a[3]  the same, inputs + 8;
//   b0, b1      token c, inputs 2 q and 2 q + 1, then + 8;
//   d[0], d[1]  row c, tokens 2 q and 2 q + 1;               d[2], d[3]  the same of row c + 8.
#pragma once
#include "common/async_copy.cuh"
#include "common/half_codes.cuh"

// d [16, 8] += a [16, 16] b [8, 16]^T
template <int kKind>
__device__ __forceinline__ void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    if constexpr (kKind == kBfloat16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// d [16, 8] += a [16, 32] b [8, 32]^T, where of each four inputs of a row of `a` two are kept. `a`
// is the kept half: its 16 "inputs" are those above. b[0] to b[3] are token c at inputs 2 q and
// 2 q + 1, then + 8, + 16 and + 24.
//
// `positions` says which two of four are kept: 2 bits each, the first of the two lower; eight fours
// are 32 bits. It is read in the lanes with (lane / 2) % 2 == kSelector alone: the low half has the
// positions of row c, the high half those of row c + 8, each for the inputs from 16 (lane % 2) to
// 16 (lane % 2) + 15.
template <int kKind, int kSelector>
__device__ __forceinline__ void multiply_add_sparse(float (&d)[4], const u32 (&a)[4], const u32 (&b)[4], u32 positions) {
    if constexpr (kKind == kBfloat16)
        asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                     "{%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(positions),
                       "n"(kSelector));
    else
        asm volatile("mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
                     "{%8, %9, %10, %11}, {%0, %1, %2, %3}, %12, %13;"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(b[2]), "r"(b[3]), "r"(positions),
                       "n"(kSelector));
}
