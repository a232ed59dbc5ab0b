// How sm_80 and newer bring operands to the tensor cores: cp.async from global to shared memory,
// then ldmatrix from shared memory to registers. Shared memory is named by its 32-bit address
// (smem_address of ptx.cuh).
#pragma once
#include "common/ptx.cuh"

// ---- 16 bytes, global -> shared -----------------------------------------------------------------
//
// cp.async (PTX ISA, "cp.async") copies asynchronously and past L1 (.cg). Both addresses are
// multiples of 16. async_commit closes a group of the copies that the thread has started since its
// last group, and async_wait<n> waits until at most its n latest groups are incomplete. This shows
// a thread its own copies alone: a barrier must follow before it reads those of other threads.

__device__ __forceinline__ void async_copy(u32 dst, const void* src) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}
// The same, or 16 zero bytes if not `valid`: cp.async reads as many bytes as its last operand says
// and fills the rest of the 16 with zeros. `src` must be an address of global memory in either
// case.
__device__ __forceinline__ void async_copy(u32 dst, const void* src, bool valid) {
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- shared -> registers ------------------------------------------------------------------------

// Loads four matrices of 8 rows of 16 bytes (PTX ISA, "ldmatrix"). The rows may lie anywhere:
// `address` of lane i is that of row i % 8 of matrix i / 8, a multiple of 16. r[j] of lane i
// becomes the 32-bit word i % 4 of row i / 4 of matrix j, which is how mma.sync wants 8 rows of an
// operand. Eight rows in different banks are read without bank conflicts.
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
