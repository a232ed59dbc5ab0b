// The GEMM of this project on Hopper: Y^T = W X^T in s8 x s8 -> int32, exact, or in 16 bits x 16
// bits -> float32.
//
// LiquidGEMM section 5: a block is a producer warpgroup and two consumer warpgroups. The producer
// keeps a ring of stages (kPanels x 128 weight rows and kTokens tokens by a step of input channels)
// full by bulk copies. Each consumer warpgroup owns 64 rows of a panel: it turns its weights into
// registers and multiplies them itself, so that one's dequantization hides under the other's wgmma.
//
// A cluster is kSplit blocks that share the sum over K of one tile, their first or last. A block
// finishes a share of its tokens: the others push their sums of that share into its shared memory
// (st.async, counted on an mbarrier) and leave. int32 sums are exact in any order; floats are added
// over the cluster in a fixed one. The scales of groups of K are applied inside the main loop.
//
// Legend: a *row* is an output channel n; a *panel* 128 of them; a *stage* one ring slot; a *step*
// Weights::kInputs input channels; a *block* of sums is 8 tokens by 64 rows, an int4 a thread.
#pragma once
#include "hopper/epilogue.cuh"
#include "hopper/ring.cuh"
#include "hopper/work.cuh"

// Weights (weights_*.cuh) is the weight operand. It gives
//   Sum            the type of the sums: int, or float for 16-bit tokens and scaled groups;
//   kInputs        input channels of a step;
//   kTokenBytes    bytes of a token in a step, and kStageBytes those of a panel;
//   kGrouped       the sums have been scaled by groups of inputs in the main loop;
//   kTokenGroups   groups of a step whose token scales the main loop needs, 0 if it needs none;
//   kTokenScales   p.token_scale is there;
//   kZero          the epilogue subtracts a zero point times the sum of the token's codes;
//   kReadsAhead    its Source can prefetch to L2;
//   channel(n)     the place of output channel n's scale in p.scale1;
//   Source         the copies of 64 rows, step after step;
//   multiply       the main loop of a consumer warpgroup.
// Tiling (work.cuh): OneWeight or EachExpert.
template <class Weights, class Epilogue, int kTokens, int kPanels, int kSplit, int kStages, template <int, int> class Tiling>
struct Gemm {
    static constexpr int kConsumers = 256, kThreads = kConsumers + 128, kRows = 128 * kPanels;
    // Registers are dealt out per warpgroup (setmaxnreg): the producer gives most of its share to
    // the consumers.
    static constexpr int kProducerRegisters = BLOCKS_PER_SM == 1 ? 40 : 32;
    static constexpr int kConsumerRegisters = BLOCKS_PER_SM == 1 ? 232 : 104;
    // Blocks of sums, and those that each of a cluster's blocks finishes.
    static constexpr int kBlocks = kTokens / 8, kShare = (kBlocks + kSplit - 1) / kSplit;

    // With few tokens and one block per SM, stages that wait for a slot may as well wait in L2
    // (this was measured).
    static constexpr bool kReadsAhead = Weights::kReadsAhead && kTokens <= 32 && kPanels == 1 && BLOCKS_PER_SM == 1;
    static constexpr int kAhead = 2;       // steps beyond the ring
    static constexpr u32 kPatience = 425;  // clocks without a free slot

    using Sum = typename Weights::Sum;
    static constexpr int kTokenBytes = kTokens * Weights::kTokenBytes, kWeightBytes = kPanels * Weights::kStageBytes;
    static constexpr int kRing = kStages * (kTokenBytes + kWeightBytes);
    // The sums that the other splits push here. With few tokens they lie beside the ring, so that
    // no block waits until it is free.
    static constexpr int kBlockBytes = kConsumers * 16, kInbox = (kSplit - 1) * kShare * kPanels * kBlockBytes;
    static constexpr bool kOverRing = kTokens * kPanels > 128;
    static constexpr int kInboxAt = kOverRing ? 0 : kRing, kStagingAt = kRing + (kOverRing ? 0 : kInbox);
    static_assert(!kOverRing || kInbox <= kRing, "the inbox is larger than the ring");
    // An inbox over the ring has to wait until the ring is done: the shared tile is the last then.
    using Tiles = Work<kSplit, !kOverRing, Weights::kInputs>;
    static constexpr int kScalesAt = kStagingAt + 2 * Epilogue::kBytes;
    static constexpr int kBarriersAt = kScalesAt + 2 * 8 * kTokens;
    using Areas = Tiling<kTokens, kRows>;
    static constexpr int kAreasAt = kBarriersAt + 16 * kStages + 8;
    // run() aligns the ring to 1024 bytes, which takes up to as many.
    static constexpr int kSharedBytes = kAreasAt + Areas::kBytes + 1024;
    static_assert(kSharedBytes <= SHARED_BYTES, "the host reserved too little shared memory");

    // Barriers: each stage is full, each stage is empty, and the inbox is full.
    struct Barriers {
        u32 full, empty, inbox;
        __device__ __forceinline__ explicit Barriers(u32 base)
            : full(base + kBarriersAt), empty(full + 8 * kStages), inbox(empty + 8 * kStages) {}
    };

    static __device__ __forceinline__ void run(const Params& p) {
        extern __shared__ u8 raw[];
        u8* shared = raw + (1024 - smem_address(raw) % 1024) % 1024;
        const u32 base = smem_address(shared), split_rank = kSplit > 1 ? cluster_rank() : 0;
        const Barriers bars(base);
        const Areas areas(p, shared + kAreasAt);
        areas.prepare();
        if (threadIdx.x == 0) {
            prefetch_map(&p.tokens);
            for (int i = 0; i < kStages; ++i) {
                mbar_init(bars.full + 8 * i, 1 + 2 * kPanels);  // arrivals of the producer warps
                mbar_init(bars.empty + 8 * i, 8);               // eight consumer warps
            }
            if constexpr (kSplit > 1) {
                mbar_init(bars.inbox, 1);
                const int mine = min(kShare, max(0, kBlocks - static_cast<int>(split_rank) * kShare));
                mbar_expect(bars.inbox, (kSplit - 1) * mine * kPanels * kBlockBytes);
            }
            mbar_init_fence();
        }
        __syncthreads();
        const bool shares = kSplit > 1 && Tiles(p, areas.tiles(), split_rank).shares();
        if (shares && !kOverRing) cluster_arrive();

        if (threadIdx.x >= kConsumers) {
            give_registers<kProducerRegisters>();
            const int warp = uniform(threadIdx.x / 32 - kConsumers / 32);
            if (warp < 2) produce_weights(p, areas, split_rank, warp, base + kStages * kTokenBytes, bars);
            if (warp == 2) produce_tokens(p, areas, split_rank, base, bars);
            __syncwarp();
            if (shares) meet();
        } else {
            take_registers<kConsumerRegisters>();
            grid_wait();
            consume(p, areas, split_rank, shared, bars);
        }
    }

    // Waits until all blocks of the cluster can be sent to: they have started, or have left the
    // ring if the inbox lies over it.
    static __device__ __forceinline__ void meet() {
        if constexpr (kOverRing) cluster_sync();
        else cluster_wait();
    }

    // One warp copies 64 of a panel's rows, another the other 64, a third the tokens: a single
    // thread that issues all seven copies of a stage cannot keep up with the memory. The weights
    // fill the ring while the kernel before drains.
    static __device__ __forceinline__ void produce_weights(const Params& p, const Areas& areas, u32 split_rank, int half, u32 weights,
                                                           const Barriers& bars) {
        Tiles work(p, areas.tiles(), split_rank);
        Place<kStages> place;
        for (Segment s; work.next(s);) {
            const int row = areas.area(s.tile).row + 64 * half;
            typename Weights::Source first(p, row, s.from), second(p, row + 128, s.from);
            int ahead = 0;
            for (int step = s.from; step < s.to; ++step) {
                const u32 stage = weights + place.slot * kWeightBytes, bar = bars.full + 8 * place.slot;
                const u32 empty = bars.empty + 8 * place.slot;
                if constexpr (kReadsAhead) wait_reading_ahead(first, empty, place.parity ^ 1, s.to - step, ahead);
                else mbar_wait(empty, place.parity ^ 1);
                first.load(stage, half, bar);
                if constexpr (kPanels == 2) second.load(stage + Weights::kStageBytes, half, bar);
                place.advance();
            }
        }
    }

    // While no slot is free, the next of the `left` steps go to L2, `ahead` of them so far. Only
    // then, since a byte that goes through L2 first costs more than one that does not.
    template <class Source>
    static __device__ __forceinline__ void wait_reading_ahead(const Source& source, u32 empty, u32 parity, int left, int& ahead) {
        ahead = max(ahead - 1, 0);
        u32 since = clock_now();
        while (!all_lanes(mbar_test(empty, parity))) {
            if (all_lanes(clock_now() - since < kPatience)) continue;
            if (ahead < min(kAhead, left)) source.prefetch(ahead++);
            since = clock_now();
        }
    }

    static __device__ __forceinline__ void produce_tokens(const Params& p, const Areas& areas, u32 split_rank, u32 tokens, const Barriers& bars) {
        Tiles work(p, areas.tiles(), split_rank);
        Place<kStages> place;
        grid_wait();
        for (Segment s; work.next(s);) {
            const int m = areas.area(s.tile).token;
            for (int step = s.from; step < s.to; ++step) {
                mbar_wait(bars.empty + 8 * place.slot, place.parity ^ 1);
                if (elect_one()) {
                    const u32 bar = bars.full + 8 * place.slot;
                    if constexpr (Weights::kTokenGroups > 0) {
                        const u32 stage = tokens + kStages * kTokenBytes + place.slot * kWeightBytes;
                        mbar_expect(bar, kTokenBytes + Weights::kTokenGroups * Weights::token_scale_bytes(p, m));
                        Weights::load_token_scales(p, stage, step, m, bar);
                    } else {
                        mbar_expect(bar, kTokenBytes);
                    }
                    // Boxes of 128 bytes of each token, swizzled.
#pragma unroll
                    for (int i = 0; i < Weights::kTokenBytes; i += 128)
                        tensor_copy(tokens + place.slot * kTokenBytes + i * kTokens, &p.tokens, step * Weights::kTokenBytes + i, m, bar);
                }
                place.advance();
                // The next kernel fills its rings while this one drains; earlier, its weights would
                // compete with these.
                if (work.done == work.count && step == max(s.from, s.to - kStages)) grid_release();
            }
        }
    }

    static __device__ __forceinline__ void consume(const Params& p, const Areas& areas, u32 split_rank, u8* shared, const Barriers& bars) {
        // By a shuffle, so that values derived from it stay in registers and are not computed again
        // in each step.
        const int wg = uniform(threadIdx.x / 128), t = threadIdx.x % 128;
        float* scales = reinterpret_cast<float*>(shared + kScalesAt) + wg * 2 * kTokens;
        int* token_sums = reinterpret_cast<int*>(scales + kTokens);
        Epilogue epilogue{p, shared + kStagingAt + wg * Epilogue::kBytes, scales, token_sums, wg, t, areas.columns()};
        Ring<kWeightBytes, kTokenBytes, kStages> ring{
            shared + kStages * kTokenBytes, swizzled_operand(smem_address(shared)), bars.full, bars.empty};

        Tiles work(p, areas.tiles(), split_rank);
        for (Segment s; work.next(s);) {
            const Area area = areas.area(s.tile);
            const int first_token = area.token, n = area.row + wg * 64, column = area.column + wg * 64;
            epilogue.end = area.end;
            Rows rows[kPanels];  // of this thread
#pragma unroll
            for (int i = 0; i < kPanels; ++i) rows[i].template read<Weights>(p, n + 128 * i + t / 32 * 16 + t % 32 / 4);
            constexpr int kFetched = (kTokens + 127) / 128;  // token scales of this thread
            float scale[kFetched];
            int token_sum[kFetched];
#pragma unroll
            for (int i = 0; i < kFetched; ++i) {
                const int token = t + 128 * i, m = first_token + token;
                const bool valid = token < kTokens && m < area.end;
                scale[i] = Weights::kTokenScales && valid ? p.token_scale[m] : 0.f;
                token_sum[i] = valid && p.token_sum ? p.token_sum[m] : 0;
            }

            Sum acc[kPanels][kTokens / 2] = {};
            Weights::template multiply<kPanels, kTokens>(acc, ring, s.to - s.from, wg, t);

#pragma unroll
            for (int i = 0; i < kFetched; ++i)
                if (t + 128 * i < kTokens) scales[t + 128 * i] = scale[i], token_sums[t + 128 * i] = token_sum[i];
            named_barrier(2 + wg, 128);
            if (kSplit > 1 && s.shared) {
                Sum share[kPanels][4 * kShare] = {};
                add_over_cluster(share, acc, shared, bars.inbox, split_rank);
                store<kShare>(epilogue, share, rows, first_token, column, 8 * kShare * split_rank);
            } else {
                store<kBlocks>(epilogue, acc, rows, first_token, column, 0);
            }
        }
    }

    template <int kCount>
    static __device__ __forceinline__ void store(Epilogue& epilogue, const Sum (&sums)[kPanels][4 * kCount], const Rows (&rows)[kPanels], int m,
                                                 int n, int first_token) {
        if (first_token >= kTokens) return;
#pragma unroll
        for (int i = 0; i < kPanels; ++i) epilogue.template store<kCount>(sums[i], rows[i], m, n + 128 * i, first_token);
    }

    // `share` becomes the cluster's sums of this split's tokens: its own and those that the other
    // blocks send. The others are sent the sums of their tokens. It runs once, since the inbox is
    // for one tile and may lie over the ring.
    static __device__ __forceinline__ void add_over_cluster(Sum (&share)[kPanels][4 * kShare], const Sum (&acc)[kPanels][kTokens / 2],
                                                            const u8* shared, u32 full, u32 split_rank) {
        const u8* inbox = shared + kInboxAt + threadIdx.x * 16;  // [from][block][panel][thread]
        meet();
#pragma unroll
        for (int owner = 0; owner < kSplit; ++owner) {
            const u32 from = split_rank - (split_rank > owner);
            const u32 there = remote(smem_address(inbox) + from * kShare * kPanels * kBlockBytes, owner), done = remote(full, owner);
#pragma unroll
            for (int j = 0; j < min(kShare, kBlocks - owner * kShare); ++j)
#pragma unroll
                for (int i = 0; i < kPanels; ++i) {
                    const Sum* sums = acc[i] + 4 * (owner * kShare + j);
                    if (owner == split_rank) add(share[i] + 4 * j, sums);
                    else send(there + (j * kPanels + i) * kBlockBytes, done, sums);
                }
        }
        mbar_wait(full, 0);
#pragma unroll
        for (int from = 0; from < kSplit - 1; ++from)
#pragma unroll
            for (int j = 0; j < kShare; ++j)
#pragma unroll
                for (int i = 0; i < kPanels; ++i) {
                    if (split_rank * kShare + j >= kBlocks) continue;
                    const Four sent = *reinterpret_cast<const Four*>(inbox + ((from * kShare + j) * kPanels + i) * kBlockBytes);
                    add(share[i] + 4 * j, sent.v);
                }
    }

    // The four sums that a thread has of a block.
    struct alignas(16) Four {
        Sum v[4];
    };
    static __device__ __forceinline__ void add(Sum* total, const Sum* v) {
#pragma unroll
        for (int i = 0; i < 4; ++i) total[i] += v[i];
    }
};
