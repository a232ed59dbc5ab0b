// Instructions that CUDA C++ has no name for: mbarriers, bulk copies, clusters, wgmma's fences and
// others. Most need Hopper; grid_wait, grid_release, uniform, all_lanes, named_barrier and
// clock_now run on all GPUs that the kernels are for. The PTX ISA describes each under the
// instruction's name. csrc includes no header but its own, so that NVRTC needs none.
//
// Shared memory is named by 32-bit addresses (smem_address), since asm operands take these.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A CUtensorMap, as the host's cuTensorMapEncodeTiled writes it (qtool/kernels/launch.py): it
// describes a matrix in global memory and the box of it that one copy brings. It is opaque here,
// aligned to 64 bytes, and lies in the kernel's __grid_constant__ parameters, because the copy
// instructions take its address.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

// The address in shared memory of what `p` points to; it must lie there.
__device__ __forceinline__ u32 smem_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// ---- mbarriers ----------------------------------------------------------------------------------
//
// An mbarrier is 8 bytes of shared memory, here named by `bar`. It goes through phases of
// alternating parity, the first of which has parity 0. A phase is completed when all of its
// arrivals have come and, if bytes were announced (mbar_expect), copies have brought as many. A
// wait for a parity returns when the phase of that parity is completed; a wait for parity 1 on a
// fresh barrier returns at once, as the phase before the first counts as completed.

// One thread calls it. Each phase takes `arrivals` arrivals.
__device__ __forceinline__ void mbar_init(u32 bar, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes the initialized barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void mbar_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbar_arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// Announces `bytes` of copies to the current phase, and arrives.
__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// What was written before the arrivals, and what the copies brought, is visible afterwards.
__device__ __forceinline__ void mbar_wait(u32 bar, u32 parity) {
    u32 done;
    do {
        asm volatile(
            "{\n.reg .pred p;\n"
            "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
            "selp.u32 %0, 1, 0, p;\n}"
            : "=r"(done)
            : "r"(bar), "r"(parity)
            : "memory");
    } while (!done);
}

// Whether mbar_wait would return at once.
__device__ __forceinline__ bool mbar_test(u32 bar, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return done;
}

// ---- bulk copies (global -> shared), completing on an mbarrier ----------------------------------
//
// One thread issues a copy for the whole block; its bytes are counted on the mbarrier at `bar`,
// which was told to expect them.

// A run of bytes: both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(bar)
        : "memory");
}

// The cache policy that createpolicy.fractional.L2::evict_first makes for all lines, as a constant.
constexpr u64 kEvictFirst = 0x12F0000000000000ull;

// bulk_copy of what a kernel reads once (weights): its lines leave the L2 before those of tokens
// and outputs.
__device__ __forceinline__ void bulk_copy_once(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(bar), "l"(kEvictFirst)
        : "memory");
}

// Asks for the bytes to be brought into L2; `src` and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_prefetch_l2(const void* src, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

// The box of a matrix whose first item is (y, x), x along the contiguous dimension, both in items.
// The map says how large the box is and how its rows are swizzled in shared memory. What lies
// beyond the matrix arrives as zeros, and counts towards the barrier's bytes as the rest does.
__device__ __forceinline__ void tensor_copy(u32 dst, const TensorMap* map, int x, int y, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            dst),
        "l"(map), "r"(x), "r"(y), "r"(bar)
        : "memory");
}

// tensor_copy of what a kernel reads once, as bulk_copy_once.
__device__ __forceinline__ void tensor_copy_once(u32 dst, const TensorMap* map, int x, int y, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
            dst),
        "l"(map), "r"(x), "r"(y), "r"(bar), "l"(kEvictFirst)
        : "memory");
}

// Asks for the box to be brought into L2.
__device__ __forceinline__ void tensor_prefetch_l2(const TensorMap* map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}

// Asks for the map itself, so that the first copy does not wait for it.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- clusters -----------------------------------------------------------------------------------

// The number of this block in its cluster.
__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// A barrier of all threads of the cluster's blocks; what was written to shared memory before it is
// visible after it.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// The two halves of a cluster barrier, without making memory visible: after cluster_wait all
// threads of all blocks have called cluster_arrive. So every block has started, and its shared
// memory can be written from here.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// The address, valid in the whole cluster, of what lies in block `rank`'s shared memory where
// `address` lies in this block's.
__device__ __forceinline__ u32 remote(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

// The bits of a sum.
__device__ __forceinline__ int bits(int v) { return v; }
__device__ __forceinline__ int bits(float v) { return __float_as_int(v); }

// Writes four 32-bit values to another block's shared memory without waiting (st.async), and counts
// their 16 bytes on an mbarrier of that block; both addresses come from remote(). `there` is a
// multiple of 16.
template <class T>
__device__ __forceinline__ void send(u32 there, u32 bar_there, const T* v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(there),
                 "r"(bar_there), "r"(bits(v[0])), "r"(bits(v[1])), "r"(bits(v[2])), "r"(bits(v[3]))
                 : "memory");
}

// The same for one value, and 4 bytes.
template <class T>
__device__ __forceinline__ void send_word(u32 there, u32 bar_there, T v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(there), "r"(bar_there), "r"(bits(v)) : "memory");
}

// ---- grids that overlap (programmatic dependent launch; PTX ISA, "griddepcontrol") --------------
//
// From Hopper on the host may launch a kernel so that it starts before the kernel ahead of it in
// the stream has ended. grid_wait returns when that kernel has ended and its writes are visible.
// grid_release lets the next kernel start as soon as all blocks of this one have called it or have
// ended. Both do nothing in a plain launch, and before Hopper.
//
// Every kernel of this project that calls grid_release has called grid_wait before. So when a
// kernel starts, all kernels but the one just ahead of it have ended. Before its own grid_wait a
// kernel may therefore read only two things: weights, which no kernel writes, and the numbers of
// tokens of a mixture's experts. experts/route.cu writes these and never calls grid_release, so the
// kernel just behind it starts after its end.

__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void grid_release() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- warps --------------------------------------------------------------------------------------

// True in one thread of a converged warp. The compiler knows that it is one thread, which it does
// not know of a test of the lane's number: it then issues the copies inside plainly instead of in a
// loop over the active lanes (measured: 2x on the whole GEMM).
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected)::"memory");
    return elected;
}
// Lane 0's value in all lanes of a converged warp. Callers pass what all lanes have already, such
// as the warp's number: values derived from a shuffle's result stay in registers and are not
// computed again.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFF, value, 0); }
__device__ __forceinline__ bool all_lanes(bool value) { return __all_sync(0xFFFFFFFF, value); }
// The multiprocessor's clock, low 32 bits.
__device__ __forceinline__ u32 clock_now() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
}

// Stores two transposed 8 x 8 matrices of 16-bit items (PTX ISA, "stmatrix" .trans). `row`: lanes 0
// to 7 have the addresses of the stored rows of the first matrix, lanes 8 to 15 those of the
// second, all multiples of 16. Lane i has two items of column i / 4 of each matrix as stored, in
// rows 2 (i % 4) and the next, the first in the low half.
__device__ __forceinline__ void store_transposed(u32 row, u32 first, u32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(first), "r"(second) : "memory");
}

// ---- registers of a warpgroup -------------------------------------------------------------------
//
// setmaxnreg: all warps of a warpgroup call it. From then on each thread has kCount registers, a
// multiple of 8 from 24 to 256; take_registers waits until other warpgroups have given enough.

template <int kCount>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- barriers and fences ------------------------------------------------------------------------

// Barrier `id` of 16, for as many `threads`, whole warps; 0 is that of __syncthreads.
__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// wgmma runs asynchronously. wgmma_fence orders a warpgroup's earlier accesses to registers before
// the wgmma that follow, wgmma_commit closes a group of those issued since the last one, and
// wgmma_wait<n> waits until at most the n latest groups are incomplete.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The asm of keep and settle is empty: it ties registers to a place in the program. By keep,
// registers that an asynchronous wgmma reads hold their values at least up to this point.
template <int kCount>
__device__ __forceinline__ void keep(const u32 (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" ::"r"(r[i]) : "memory");
}

// By settle, sums that an asynchronous wgmma has written are not read before this point.
template <int kCount>
__device__ __forceinline__ void settle(int (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(r[i])::"memory");
}
template <int kCount>
__device__ __forceinline__ void settle(float (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(r[i])::"memory");
}

// The descriptor by which wgmma finds an operand in shared memory (PTX ISA, "Matrix descriptor"),
// all lengths in units of 16 bytes: bits 0-13 are the address, 16-29 the leading offset, which this
// swizzle does not use, 32-45 the stride offset, 62-63 the swizzle (1 is 128 bytes). The operand is
// K-major: rows of 128 bytes, eight of which are a swizzled block of 1024 bytes; the next eight
// rows follow it. 16 bytes further in K is 1 more.
__device__ __forceinline__ u64 swizzled_operand(u32 address) {
    const u64 stride = 1024 >> 4, swizzle_128 = 1;
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (stride << 32) | (swizzle_128 << 62);
}
