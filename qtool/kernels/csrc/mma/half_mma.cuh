// mma.sync of sm_80 and newer for 16-bit operands.
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

// d [16, 8] += a [16, 32] b [8, 32]^T, `a` 2:4 sparse: its kept half and their positions, which the lanes with
// (lane / 2) % 2 == kSelector hold (rows lane / 4 and + 8, columns 16 (lane % 2) ..).
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
