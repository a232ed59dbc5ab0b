// Hopper instructions that CUDA C++ has no name for: mbarriers, bulk copies, clusters, wgmma's fences.
// No header is included anywhere in csrc, so that NVRTC needs none.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A CUtensorMap, opaque; it must lie in parameter space, aligned.
struct alignas(64) TensorMap {
    u8 bytes[128];
};

__device__ __forceinline__ u32 smem_address(const void* p) {
    return static_cast<u32>(__cvta_generic_to_shared(p));
}

// ---- mbarriers -------------------------------------------------------------------------------

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

__device__ __forceinline__ void mbar_expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

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

// The same without waiting.
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

// ---- bulk copies (global -> shared), completing on an mbarrier ---------------------------------

__device__ __forceinline__ void bulk_copy(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(bar)
        : "memory");
}

// The L2 policy "evict first" of all lines, as createpolicy encodes it.
constexpr u64 kEvictFirst = 0x12F0000000000000ull;

// Of what a kernel reads once: it leaves the L2 before tokens and outputs do.
__device__ __forceinline__ void bulk_copy_once(u32 dst, const void* src, u32 bytes, u32 bar) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(dst),
        "l"(src), "r"(bytes), "r"(bar), "l"(kEvictFirst)
        : "memory");
}

__device__ __forceinline__ void bulk_prefetch_l2(const void* src, u32 bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(src), "r"(bytes) : "memory");
}

// A box of a 2-D tensor; `x` along the contiguous dimension.
__device__ __forceinline__ void tensor_copy(u32 dst, const TensorMap* map, int x, int y, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            dst),
        "l"(map), "r"(x), "r"(y), "r"(bar)
        : "memory");
}

__device__ __forceinline__ void tensor_copy_once(u32 dst, const TensorMap* map, int x, int y, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(
            dst),
        "l"(map), "r"(x), "r"(y), "r"(bar), "l"(kEvictFirst)
        : "memory");
}

__device__ __forceinline__ void tensor_prefetch_l2(const TensorMap* map, int x, int y) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" ::"l"(map), "r"(x), "r"(y) : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- clusters --------------------------------------------------------------------------------

__device__ __forceinline__ u32 cluster_rank() {
    u32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// Every thread of every block of the cluster; shared memory written before is visible after.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Its two halves, without the memory's order: every block of the cluster has arrived.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

// Where block `rank` has what lies at this address here.
__device__ __forceinline__ u32 remote(u32 address, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}

__device__ __forceinline__ int bits(int v) { return v; }
__device__ __forceinline__ int bits(float v) { return __float_as_int(v); }

// Writes four values to a block's shared memory, and counts their bytes on a barrier there.
template <class T>
__device__ __forceinline__ void send(u32 there, u32 bar_there, const T* v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%2, %3, %4, %5}, [%1];" ::"r"(there),
                 "r"(bar_there), "r"(bits(v[0])), "r"(bits(v[1])), "r"(bits(v[2])), "r"(bits(v[3]))
                 : "memory");
}

template <class T>
__device__ __forceinline__ void send_word(u32 there, u32 bar_there, T v) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];" ::"r"(there), "r"(bar_there), "r"(bits(v)) : "memory");
}

// ---- grids that overlap (programmatic dependent launch); no effect on a plain launch, none before Hopper ----
//
// A kernel of this project calls grid_release after grid_wait, and none writes weights. So when a GEMM runs, all but the
// kernel just before it are done, and what it reads before its own grid_wait is what the stream's order says: weights, and how
// many tokens each expert of a mixture has, which experts/route.cu writes, that never calls grid_release.

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

// ---- warps -------------------------------------------------------------------------------------

// True in one thread of a converged warp. Unlike a test of the lane, the compiler knows it to be one, and issues
// the copies inside plainly instead of in a loop over the active lanes (measured: 2x on the whole GEMM).
__device__ __forceinline__ bool elect_one() {
    u32 elected;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(elected)::"memory");
    return elected;
}
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xFFFFFFFF, value, 0); }
__device__ __forceinline__ bool all_lanes(bool value) { return __all_sync(0xFFFFFFFF, value); }
__device__ __forceinline__ u32 clock_now() {
    u32 now;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(now)::"memory");
    return now;
}

// Two 8 x 8 matrices of 16 bits, transposed; lanes 0-7 name the rows of the first, 8-15 of the second.
__device__ __forceinline__ void store_transposed(u32 row, u32 first, u32 second) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(first), "r"(second) : "memory");
}

// ---- registers of a warpgroup ---------------------------------------------------------------------

template <int kCount>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

// ---- barriers and fences -----------------------------------------------------------------------

__device__ __forceinline__ void named_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Registers that an asynchronous wgmma still reads stay untouched up to this point.
template <int kCount>
__device__ __forceinline__ void keep(const u32 (&r)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) asm volatile("" ::"r"(r[i]) : "memory");
}

// Sums that an asynchronous wgmma has written are not read before this point.
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

// Descriptor of a K-major operand in 128-byte rows, swizzled over 128 bytes: 8 rows are 1024 bytes apart.
__device__ __forceinline__ u64 swizzled_operand(u32 address) {
    const u64 stride = 1024 >> 4, swizzle_128 = 1;
    return static_cast<u64>((address & 0x3FFFF) >> 4) | (1ull << 16) | (stride << 32) | (swizzle_128 << 62);
}
