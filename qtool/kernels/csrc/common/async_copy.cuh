// How sm_80 and newer bring data to tensor cores: asynchronous copies to shared memory, ldmatrix from there.
#pragma once
#include "common/ptx.cuh"

// ---- 16 bytes, global -> shared, in groups that are waited for in order ---------------------------

__device__ __forceinline__ void async_copy(u32 dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
__device__ __forceinline__ void async_copy(u32 dst, const void* src, bool valid) {
    const int bytes = valid ? 16 : 0;  // the rest of the 16 becomes zeros
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Four matrices of 8 rows x 16 bytes; lane i names row i % 8 of matrix i / 8 and gets word i % 4 of row i / 4 of each.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
