// The one GEMM of this project on Hopper: Y^T = W X^T in s8 x s8 -> int32, exact.
//
// LiquidGEMM section 5: a block is a producer warpgroup and two consumer warpgroups. The producer keeps a
// ring of stages (128 weight rows and kTokens tokens by 128 input channels) full by bulk copies. Each consumer
// warpgroup owns 64 of the rows: it turns its weights into registers and multiplies them itself, so that
// one's dequantization hides under the other's wgmma.
//
// A cluster is kRows x kSplit blocks. kRows blocks with different weight rows share the tokens: each loads
// a part and multicasts it. kSplit blocks share the sum over K of the same tile, and add their int32 sums
// through distributed shared memory: exact, in any order.
//
// Legend: a *row* is an output channel n; a *stage* one ring slot; `step` counts 128 input channels.
#pragma once
#include "epilogue.cuh"
#include "params.cuh"

// A consumer's place in the ring.
template <class Weights, int kTokens, int kStages, int kRows>
struct Ring {
    const u8* weights;
    u64 token_operand;
    u32 full, empty;
    u32 first_peer;  // rank of the first block that shares the tokens
    int slot = 0, previous = -1;
    u32 phase = 0;

    __device__ __forceinline__ void wait_full() const { mbar_wait(full + 8 * slot, phase); }
    __device__ __forceinline__ const u8* stage() const { return weights + slot * Weights::kStageBytes; }
    __device__ __forceinline__ u64 tokens() const { return token_operand + slot * (kTokens * 128 / 16); }
    __device__ __forceinline__ void advance() {
        previous = slot;
        if (++slot == kStages) slot = 0, phase ^= 1;
    }
    // One arrival per warp at every block whose producer fills this slot.
    __device__ __forceinline__ void release_previous() {
        const u32 lane = threadIdx.x % 32;
        if (previous >= 0) {
            if constexpr (kRows == 1) {
                if (lane == 0) mbar_arrive(empty + 8 * previous);
            } else if (lane < kRows) {
                mbar_arrive_at(empty + 8 * previous, first_peer + lane);
            }
        }
        previous = -1;
    }
};

template <class Weights, class Epilogue, int kTokens, int kRows, int kSplit, int kStages>
struct Gemm {
    static constexpr int kConsumers = 256, kThreads = kConsumers + 128, kCluster = kRows * kSplit;
    // Registers are dealt out per warpgroup (setmaxnreg): the producer gives most of its share to the consumers.
    static constexpr int kProducerRegisters = BLOCKS_PER_SM == 1 ? 40 : 32;
    static constexpr int kConsumerRegisters = BLOCKS_PER_SM == 1 ? 232 : 104;
    static constexpr int kTokenBytes = kTokens * 128;
    static constexpr int kRing = kStages * (kTokenBytes + Weights::kStageBytes);
    static constexpr int kSums = kSplit > 1 ? 512 * kTokens : 0;  // int32 sums of the block, over the ring
    static constexpr int kStagingAt = kRing > kSums ? kRing : kSums;
    static constexpr int kScalesAt = kStagingAt + 2 * Epilogue::kBytes;
    static constexpr int kBarriersAt = kScalesAt + 2 * 2 * 4 * kTokens;
    static constexpr int kSharedBytes = kBarriersAt + 16 * kStages + 1024;  // 1024 to align the ring by hand
    static_assert(kSharedBytes <= SHARED_BYTES, "the host reserved too little shared memory");

    static __device__ __forceinline__ void run(const Params& p) {
        extern __shared__ u8 raw[];
        u8* shared = raw + (1024 - smem_address(raw) % 1024) % 1024;
        const u32 base = smem_address(shared), full = base + kBarriersAt, empty = full + 8 * kStages;
        const u32 rank = kCluster > 1 ? cluster_rank() : 0, row_rank = rank % kRows, split_rank = rank / kRows;

        if (threadIdx.x == 0) {
            prefetch_map(&p.tokens);
            for (int i = 0; i < kStages; ++i) {
                mbar_init(full + 8 * i, 3);  // three producer warps
                mbar_init(empty + 8 * i, 8 * kRows);  // one arrival per consumer warp of each block
            }
            mbar_init_fence();
        }
        if constexpr (kCluster > 1) cluster_sync();
        else __syncthreads();
        grid_release();

        const int all_steps = (p.k + 127) / 128;
        const int begin = all_steps * split_rank / kSplit, end = all_steps * (split_rank + 1) / kSplit;
        const int first = blockIdx.x / kCluster, stride = gridDim.x / kCluster;

        if (threadIdx.x >= kConsumers) {
            give_registers<kProducerRegisters>();
            const int warp = uniform(threadIdx.x / 32 - kConsumers / 32);
            const u32 weights = base + kStages * kTokenBytes;
            if (warp < 2) produce_weights(p, warp, weights, full, empty, first, stride, row_rank, begin, end);
            if (warp == 2) produce_tokens(p, base, full, empty, first, stride, row_rank, split_rank, begin, end);
            __syncwarp();
            if constexpr (kSplit > 1) cluster_sync();  // sums written
            if constexpr (kCluster > 1) cluster_sync();  // nobody reaches into this block any more
            return;
        }

        take_registers<kConsumerRegisters>();
        grid_wait();
        const int wg = threadIdx.x / 128, t = threadIdx.x % 128;
        u8* staging = shared + kStagingAt + wg * Epilogue::kBytes;
        float* scales = reinterpret_cast<float*>(shared + kScalesAt) + wg * 2 * kTokens;
        int* sums = reinterpret_cast<int*>(scales + kTokens);
        Ring<Weights, kTokens, kStages, kRows> ring{shared + kStages * kTokenBytes, swizzled_operand(base), full, empty, split_rank * kRows};

        for (int tile = first; tile < p.tiles; tile += stride) {
            const int m = tile % p.token_tiles * kTokens;
            const int n = (tile / p.token_tiles * kRows + row_rank) * 128 + wg * 64;
            Rows rows;
            rows.read(p, n + t / 32 * 16 + t % 32 / 4);
            constexpr int kMine = (kTokens + 127) / 128;  // token scales this thread fetches
            float scale[kMine];
            int sum[kMine];
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                const bool valid = t + 128 * i < kTokens && m + t + 128 * i < p.m;
                scale[i] = valid ? p.token_scale[m + t + 128 * i] : 0.f;
                sum[i] = valid && p.token_sum ? p.token_sum[m + t + 128 * i] : 0;
            }

            int acc[kTokens / 2];
#pragma unroll
            for (int i = 0; i < kTokens / 2; ++i) acc[i] = 0;
            Weights::template multiply<kTokens>(acc, ring, end - begin, wg, t);

#pragma unroll
            for (int i = 0; i < kMine; ++i)
                if (t + 128 * i < kTokens) scales[t + 128 * i] = scale[i], sums[t + 128 * i] = sum[i];
            named_barrier(2 + wg, 128);

            if constexpr (kSplit == 1) {
                Epilogue::template store<kTokens / 8>(p, acc, rows, scales, sums, staging, m, n, 0, wg, t);
            } else {
                reduce_and_store(p, acc, rows, scales, sums, shared, staging, m, n, row_rank, split_rank, wg, t);
            }
        }
        if constexpr (kCluster > 1) cluster_sync();
    }

    // One warp copies 64 of the block's rows, another the other 64, a third the tokens: a single thread that issues
    // all seven copies of a stage cannot keep up with the memory.
    static __device__ __forceinline__ void produce_weights(const Params& p, int half, u32 weights, u32 full, u32 empty, int first,
                                                           int stride, int row_rank, int begin, int end) {
        int slot = 0;
        u32 phase = 1;  // a fresh ring is empty
        for (int tile = first; tile < p.tiles; tile += stride) {
            const int row = (tile / p.token_tiles * kRows + row_rank) * 128 + 64 * half;
            typename Weights::Source source(p, row, begin);
            if (tile == first) {
                source.prefetch(min(end - begin, kStages));
                grid_wait();
            }
            for (int step = begin; step < end; ++step) {
                mbar_wait(empty + 8 * slot, phase);
                source.load(weights + slot * Weights::kStageBytes, half, full + 8 * slot);
                if (++slot == kStages) slot = 0, phase ^= 1;
            }
        }
    }

    static __device__ __forceinline__ void produce_tokens(const Params& p, u32 tokens, u32 full, u32 empty, int first, int stride,
                                                          int row_rank, int split_rank, int begin, int end) {
        constexpr int kPart = kTokens / kRows;
        int slot = 0;
        u32 phase = 1;
        grid_wait();
        for (int tile = first; tile < p.tiles; tile += stride) {
            const int m = tile % p.token_tiles * kTokens + row_rank * kPart;
            for (int step = begin; step < end; ++step) {
                mbar_wait(empty + 8 * slot, phase);
                if (elect_one()) {
                    const u32 bar = full + 8 * slot, to = tokens + slot * kTokenBytes + row_rank * kPart * 128;
                    mbar_expect(bar, kTokenBytes);
                    if constexpr (kRows == 1) tensor_copy(to, &p.tokens, step * 128, m, bar);
                    else tensor_multicast(to, &p.tokens, step * 128, m, bar, ((1 << kRows) - 1) << (split_rank * kRows));
                }
                if (++slot == kStages) slot = 0, phase ^= 1;
            }
        }
    }

    // Each split block adds, over the cluster, the sums of its own share of the tile's tokens, and stores them.
    // One tile per cluster (the host sees to it), so the ring's memory is free for the sums.
    static __device__ __forceinline__ void reduce_and_store(const Params& p, const int (&acc)[kTokens / 2], const Rows& rows,
                                                            const float* scales, const int* token_sums, u8* shared, u8* staging, int m, int n,
                                                            u32 row_rank, u32 split_rank, int wg, int t) {
        constexpr int kBlocks = kTokens / 8, kShare = (kBlocks + kSplit - 1) / kSplit;
        int4* sums = reinterpret_cast<int4*>(shared) + wg * kBlocks * 128 + t;
        named_barrier(1, kConsumers);  // both warpgroups have left the ring
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) sums[j * 128] = make_int4(acc[4 * j], acc[4 * j + 1], acc[4 * j + 2], acc[4 * j + 3]);
        cluster_sync();
        const int first = split_rank * kShare;
        if (first >= kBlocks) return;
        int total[4 * kShare];
#pragma unroll
        for (int j = 0; j < kShare; ++j) {
            int4 v[kSplit];
#pragma unroll
            for (int s = 0; s < kSplit; ++s)
                v[s] = load_remote(smem_address(sums + (first + j) * 128), s * kRows + row_rank);
            total[4 * j] = total[4 * j + 1] = total[4 * j + 2] = total[4 * j + 3] = 0;
#pragma unroll
            for (int s = 0; s < kSplit; ++s) {
                total[4 * j] += v[s].x, total[4 * j + 1] += v[s].y, total[4 * j + 2] += v[s].z, total[4 * j + 3] += v[s].w;
            }
        }
        Epilogue::template store<kShare>(p, total, rows, scales, token_sums, staging, m, n, 8 * first, wg, t);
    }
};
