// The integer GEMM of this project on Hopper: Y^T = W X^T in s8 x s8 -> int32, exact.
//
// LiquidGEMM section 5: a block is a producer warpgroup and two consumer warpgroups. The producer keeps a
// ring of stages (128 weight rows and kTokens tokens by 128 input channels) full by bulk copies. Each consumer
// warpgroup owns 64 of the rows: it turns its weights into registers and multiplies them itself, so that
// one's dequantization hides under the other's wgmma.
//
// A cluster is kRows x kSplit blocks. kRows blocks with different weight rows share the tokens: each loads
// a part and multicasts it. kSplit blocks share the sum over K of the same tile, and add their int32 sums
// through distributed shared memory: exact, in any order. Where groups of K have scales of their own,
// the sums are floats, scaled inside the main loop and added over the cluster in the order of K.
//
// Legend: a *row* is an output channel n; a *stage* one ring slot; a *step* 128 input channels; a *block* of
// sums is 8 tokens by 64 rows, an int4 a thread.
#pragma once
#include "epilogue.cuh"
#include "ring.cuh"
#include "work.cuh"

template <class Weights, class Epilogue, int kTokens, int kRows, int kSplit, int kStages>
struct Gemm {
    static constexpr int kConsumers = 256, kThreads = kConsumers + 128, kCluster = kRows * kSplit;
    // Registers are dealt out per warpgroup (setmaxnreg): the producer gives most of its share to the consumers.
    static constexpr int kProducerRegisters = BLOCKS_PER_SM == 1 ? 40 : 32;
    static constexpr int kConsumerRegisters = BLOCKS_PER_SM == 1 ? 232 : 104;
    static constexpr int kBlocks = kTokens / 8, kShare = (kBlocks + kSplit - 1) / kSplit;  // blocks, and those a split finishes

    static constexpr int kTokenBytes = kTokens * 128;
    static constexpr int kRing = kStages * (kTokenBytes + Weights::kStageBytes);
    using Sum = typename Weights::Sum;
    static constexpr int kSums = kSplit > 1 ? 512 * kTokens : 0;  // sums of the tile, over the ring
    static constexpr int kStagingAt = kRing > kSums ? kRing : kSums;
    static constexpr int kScalesAt = kStagingAt + 2 * Epilogue::kBytes;
    static constexpr int kBarriersAt = kScalesAt + 2 * 8 * kTokens;
    static constexpr int kSharedBytes = kBarriersAt + 16 * kStages + 1024;  // 1024 to align the ring by hand
    static_assert(kSharedBytes <= SHARED_BYTES, "the host reserved too little shared memory");

    // What a warpgroup needs to finish its sums of one tile.
    struct Finish {
        const Params& p;
        const float* scales;
        const int* token_sums;
        u8* staging;
        int m, n, wg, t;
        Rows rows;
        template <int kCount>
        __device__ __forceinline__ void store(const Sum (&sums)[4 * kCount], int first_block) const {
            Epilogue::template store<kCount>(p, sums, rows, scales, token_sums, staging, m, min(m + kTokens, p.m), n, 8 * first_block, wg, t);
        }
    };

    static __device__ __forceinline__ int token_of(const Params& p, int tile) { return tile % p.token_tiles * kTokens; }
    static __device__ __forceinline__ int row_of(const Params& p, int tile, u32 row_rank) {
        return (tile / p.token_tiles * kRows + row_rank) * 128;
    }

    static __device__ __forceinline__ void run(const Params& p) {
        grid_release();
        extern __shared__ u8 raw[];
        u8* shared = raw + (1024 - smem_address(raw) % 1024) % 1024;
        const u32 base = smem_address(shared), full = base + kBarriersAt, empty = full + 8 * kStages;
        const u32 rank = kCluster > 1 ? cluster_rank() : 0, row_rank = rank % kRows, split_rank = rank / kRows;
        if (threadIdx.x == 0) {
            prefetch_map(&p.tokens);
            for (int i = 0; i < kStages; ++i) {
                mbar_init(full + 8 * i, 3);           // three producer warps
                mbar_init(empty + 8 * i, 8 * kRows);  // eight consumer warps of each block
            }
            mbar_init_fence();
        }
        if constexpr (kCluster > 1) cluster_sync();
        else __syncthreads();

        if (threadIdx.x >= kConsumers) {
            give_registers<kProducerRegisters>();
            const int warp = uniform(threadIdx.x / 32 - kConsumers / 32);
            if (warp < 2) produce_weights(p, row_rank, split_rank, warp, base + kStages * kTokenBytes, full, empty);
            if (warp == 2) produce_tokens(p, row_rank, split_rank, base, full, empty);
            __syncwarp();
            if constexpr (kSplit > 1) cluster_sync();  // sums written
        } else {
            take_registers<kConsumerRegisters>();
            grid_wait();
            consume(p, row_rank, split_rank, shared, full, empty);
        }
        if constexpr (kCluster > 1) cluster_sync();  // nobody reaches into this block any more
    }

    // One warp copies 64 of the block's rows, another the other 64, a third the tokens: a single thread that issues
    // all seven copies of a stage cannot keep up with the memory.
    static __device__ __forceinline__ void produce_weights(const Params& p, u32 row_rank, u32 split_rank, int half, u32 weights,
                                                           u32 full, u32 empty) {
        Work<kRows, kSplit> work(p, split_rank);
        Place<kStages> place;
        bool waited = false;
        for (Segment s; work.next(p, s);) {
            typename Weights::Source source(p, row_of(p, s.tile, row_rank) + 64 * half, s.from);
            if (!waited) {
                source.prefetch(s.to - s.from);
                grid_wait();
                waited = true;
            }
            for (int step = s.from; step < s.to; ++step) {
                mbar_wait(empty + 8 * place.slot, place.parity ^ 1);
                source.load(weights + place.slot * Weights::kStageBytes, half, full + 8 * place.slot);
                place.advance();
            }
        }
    }

    static __device__ __forceinline__ void produce_tokens(const Params& p, u32 row_rank, u32 split_rank, u32 tokens, u32 full, u32 empty) {
        constexpr int kPart = kTokens / kRows;
        Work<kRows, kSplit> work(p, split_rank);
        Place<kStages> place;
        grid_wait();
        for (Segment s; work.next(p, s);) {
            const int first = token_of(p, s.tile), m = first + row_rank * kPart;
            for (int step = s.from; step < s.to; ++step) {
                mbar_wait(empty + 8 * place.slot, place.parity ^ 1);
                if (elect_one()) {
                    const u32 bar = full + 8 * place.slot, to = tokens + place.slot * kTokenBytes + row_rank * kPart * 128;
                    if constexpr (Weights::kGrouped) {
                        const u32 stage = tokens + kStages * kTokenBytes + place.slot * Weights::kStageBytes;
                        mbar_expect(bar, kTokenBytes + Weights::kGroups * Weights::token_scale_bytes(p, first));
                        Weights::load_token_scales(p, stage, step, first, bar);
                    } else {
                        mbar_expect(bar, kTokenBytes);
                    }
                    if constexpr (kRows == 1) tensor_copy(to, &p.tokens, step * 128, m, bar);
                    else tensor_multicast(to, &p.tokens, step * 128, m, bar, ((1 << kRows) - 1) << (split_rank * kRows));
                }
                place.advance();
            }
        }
    }

    static __device__ __forceinline__ void consume(const Params& p, u32 row_rank, u32 split_rank, u8* shared, u32 full, u32 empty) {
        const int wg = threadIdx.x / 128, t = threadIdx.x % 128;
        float* scales = reinterpret_cast<float*>(shared + kScalesAt) + wg * 2 * kTokens;
        int* token_sums = reinterpret_cast<int*>(scales + kTokens);
        u8* staging = shared + kStagingAt + wg * Epilogue::kBytes;
        Ring<Weights, kTokens, kStages, kRows> ring{
            shared + kStages * kTokenBytes, swizzled_operand(smem_address(shared)), full, empty, split_rank * kRows};

        Work<kRows, kSplit> work(p, split_rank);
        for (Segment s; work.next(p, s);) {
            Finish finish{p, scales, token_sums, staging, token_of(p, s.tile), row_of(p, s.tile, row_rank) + wg * 64, wg, t};
            finish.rows.read(p, finish.n + t / 32 * 16 + t % 32 / 4);
            constexpr int kFetched = (kTokens + 127) / 128;  // token scales of this thread
            float scale[kFetched];
            int token_sum[kFetched];
#pragma unroll
            for (int i = 0; i < kFetched; ++i) {
                const int token = t + 128 * i, m = finish.m + token;
                const bool valid = token < kTokens && m < p.m;
                scale[i] = valid ? p.token_scale[m] : 0.f;
                token_sum[i] = valid && p.token_sum ? p.token_sum[m] : 0;
            }

            Sum acc[kTokens / 2] = {};
            Weights::template multiply<kTokens>(acc, ring, s.to - s.from, wg, t);

#pragma unroll
            for (int i = 0; i < kFetched; ++i)
                if (t + 128 * i < kTokens) scales[t + 128 * i] = scale[i], token_sums[t + 128 * i] = token_sum[i];
            named_barrier(2 + wg, 128);
            if constexpr (kSplit > 1) add_over_cluster(acc, finish, shared, row_rank, split_rank);
            else finish.template store<kBlocks>(acc, 0);
        }
    }

    // Each split block adds, over the cluster, the sums of its own share of the tile's tokens, and stores them.
    // One tile per cluster (the host sees to it), so the ring's memory is free for the sums.
    static __device__ __forceinline__ void add_over_cluster(const Sum (&acc)[kTokens / 2], const Finish& finish, u8* shared,
                                                            u32 row_rank, u32 split_rank) {
        int4* sums = reinterpret_cast<int4*>(shared) + finish.wg * kBlocks * 128 + finish.t;  // [wg][block][thread]
        named_barrier(1, kConsumers);  // both warpgroups have left the ring
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) sums[j * 128] = block_of(acc, j);
        cluster_sync();
        const int first = split_rank * kShare;
        if (first >= kBlocks) return;
        Sum total[4 * kShare] = {};
#pragma unroll
        for (int j = 0; j < kShare; ++j) {
            if (first + j >= kBlocks) break;
            int4 v[kSplit];
#pragma unroll
            for (int s = 0; s < kSplit; ++s) v[s] = load_remote(smem_address(sums + (first + j) * 128), s * kRows + row_rank);
#pragma unroll
            for (int s = 0; s < kSplit; ++s) add(total, j, v[s]);
        }
        finish.template store<kShare>(total, first);
    }

    static __device__ __forceinline__ int4 block_of(const Sum (&acc)[kTokens / 2], int j) {
        return make_int4(bits(acc[4 * j]), bits(acc[4 * j + 1]), bits(acc[4 * j + 2]), bits(acc[4 * j + 3]));
    }
    template <int kCount>
    static __device__ __forceinline__ void add(Sum (&total)[kCount], int j, const int4& v) {
        const int from[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if constexpr (Weights::kGrouped) total[4 * j + i] += __int_as_float(from[i]);
            else total[4 * j + i] += from[i];
        }
    }
    static __device__ __forceinline__ int bits(int v) { return v; }
    static __device__ __forceinline__ int bits(float v) { return __float_as_int(v); }
};
