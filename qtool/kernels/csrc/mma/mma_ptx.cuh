// What the integer GEMMs need of PTX: mma.sync on s8 and s4, the swizzle of its operands in shared
// memory, flags between blocks, and loads from shared memory by its 32-bit address.
#pragma once
#include "common/async_copy.cuh"

// The byte at which 16-byte piece `piece` of row `row` lies, for rows of 128 or of 64 bytes. A
// piece's number is XORed with bits of the row's number, so that the same piece of eight
// consecutive rows, which ldmatrix reads at once, covers all 32 banks. So do eight consecutive
// pieces of a row or of two, which async copies write. Two rows of 64 bytes fill the banks
// together, so there the pairs of rows are told apart.
__device__ __forceinline__ int swizzled_128(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
__device__ __forceinline__ int swizzled_64(int row, int piece) { return row * 64 + ((piece ^ (row >> 1 & 3)) << 4); }

// ---- d (16 x 8) += a (16 x k) b (k x 8) ---------------------------------------------------------

// PTX ISA, "mma". With c = lane / 4 and q = lane % 4, each register of a and b holds the inputs
// from 4 q to 4 q + 3 (s8), or from 8 q to 8 q + 7 (s4), of one half of k:
//   a[0], a[1]  rows c and c + 8, first half of k;    a[2], a[3]  the same, second half;
//   b[0], b[1]  column c, first half and second half;
//   d[0], d[1]  row c, columns 2 q and 2 q + 1;       d[2], d[3]  the same of row c + 8.
// For mma_s4_k32 k is one half: it takes a[0], a[1] and b[0] alone.
__device__ __forceinline__ void mma_s8(int (&d)[4], const u32* a, const u32* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_s4_k64(int (&d)[4], const u32* a, const u32* b) {
    asm volatile(
        "mma.sync.aligned.m16n8k64.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_s4_k32(int (&d)[4], const u32* a, const u32* b) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s4.s4.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// ---- flags between blocks -----------------------------------------------------------------------

// Sets a flag in global memory. Everything that this thread has written or, by an earlier barrier,
// knows to be written, is visible to a thread that acquires the flag.
__device__ __forceinline__ void release(u32* flag) {
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
}
// Waits until the flag is set.
__device__ __forceinline__ void acquire(const u32* flag) {
    u32 value;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    while (!value);
}

// ---- shared memory by its address ---------------------------------------------------------------

__device__ __forceinline__ u16 load_half(u32 address) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ u32 load_word(u32 address) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ float2 load_floats(u32 address) {
    float2 v;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
    return v;
}
__device__ __forceinline__ uint4 load_vector(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address) : "memory");
    return v;
}
