// Y^T = W X^T for 4-bit weights and 16-bit tokens on mma.sync (sm_80 and newer), float32 sums in a fixed order.
//
// A block multiplies kColumnWarps * 64 output channels by kTokens * kTokenWarps tokens. Its kTeams teams of warps
// share the sum over K, and so do kSplit blocks: each of these units takes a run of 128s of input channels, through
// its own ring of stages (64 channels), filled by bulk copies on Hopper and by cp.async before. A team waits for nobody but itself until the end, when all units put
// their sums into shared memory and each thread adds, in the order of K, those it stores.
//
// Exact products: the operand is code - 8, which 16 bits hold exactly. A group's sum is scaled in float32 and added
// to the total (without groups: every 128 inputs, unscaled), so that no weight is rounded and the tensor cores'
// truncating additions stay within 128 terms.
//
// Legend: a *column* is an output channel n, a *block of sums* 8 tokens by 64 columns of one warp.
#pragma once
#include "weights_marlin.cuh"

struct HalfParams {
    TensorMap x_map, codes_map, metadata_map, scale_map;  // the same tensors, for Hopper's bulk copies
    const u8* x;         // [M, K], 16 bit
    const u8* qweight;   // rows of [N/64] tiles of 512 bytes
    const u8* metadata;  // rows of [N/64] tiles of 256 bytes (2:4), or null
    const u8* scale;     // [G, N] of SCALE, each 64 in the lanes' order; [1, N] in the layout's channel order
    const void* bias;    // [N] of `bias_kind`, or null
    void* out;           // [M, N]
    float* workspace;    // [kSplit, M, N] where no cluster adds the units
    int m, n, k;
    int bias_kind, token_tiles;
};

// kGroup: input channels that share a scale (32, 64, 128), 0 for all. kHopper: bulk copies, and the split blocks are a cluster.
template <class Weights, int kKind, int kScale, int kOut, int kGroup, int kTokens, int kTokenWarps, int kColumnWarps, int kTeams,
          int kSplit, int kStages, bool kHopper>
struct HalfGemm {
    static constexpr int kTeamThreads = 32 * kColumnWarps * kTokenWarps, kThreads = kTeams * kTeamThreads;
    static constexpr int kColumns = 64 * kColumnWarps, kTileTokens = kTokens * kTokenWarps, kBlocks = kTokens / 8;

    static constexpr int kStep = 64, kSteps = 128 / kStep, kPairs = kStep / 32;  // steps of 128 inputs; pairs of 16 inputs in a step
    static constexpr int kRows = kStep / Weights::kInputs, kMetadataRows = Weights::kSparse ? kRows : 0;
    static constexpr int kScaleBytes = kScale == kFloat32 ? 4 : 2;
    static constexpr int kGroups = kGroup ? (kStep > kGroup ? kStep / kGroup : 1) : 0;   // whose scales a stage holds
    static constexpr int kGroupSteps = kGroup > kStep ? kGroup / kStep : 1;              // the last of which has them
    static constexpr int kGroupPairs = kGroup ? kGroup / 32 : 4;                         // added up before they are scaled

    static constexpr int kUnrolled = kGroupPairs > kPairs ? kGroupPairs / kPairs : 1;    // steps of a group

    // A ring: stages of tokens and codes, aligned for swizzled copies, then stages of metadata and scales.
    static constexpr int kTokenBytes = kStep * 2, kCodeBytes = kRows * 512 * kColumnWarps;
    static constexpr int kMetadataBytes = kMetadataRows * 256 * kColumnWarps, kGroupBytes = kColumns * kScaleBytes;
    static constexpr int kCodesAt = kTileTokens * kTokenBytes, kStageBytes = kCodesAt + kCodeBytes;
    static constexpr int kSideAt = kStages * kStageBytes, kSideBytes = kMetadataBytes + kGroups * kGroupBytes;
    static constexpr int kRingBytes = (kSideAt + kStages * kSideBytes + 1023) / 1024 * 1024;
    static_assert(kStageBytes % 1024 == 0, "a swizzled token lies at a multiple of 8 of them");

    static constexpr int kStride = kColumns + 4;  // floats of a token's sums; the 4 spread the banks
    static constexpr int kSumsBytes = kTileTokens * kStride * 4;
    static_assert(kStages >= 2, "one stage is filled while another is read");
    // A cluster's blocks finish equal shares of the tile, four columns of a token at a time: what the others send here.
    static constexpr int kFours = kColumns / 4, kShare = (kTileTokens * kFours + kSplit - 1) / kSplit;
    static constexpr int kReceivedAt = kTeams * (kRingBytes > kSumsBytes ? kRingBytes : kSumsBytes);
    static constexpr int kBarriersAt = kReceivedAt + (kHopper ? (kSplit - 1) * kShare * 16 : 0);
    static_assert(kBarriersAt + (kHopper ? 8 * (kTeams * kStages + 1) : 0) <= SHARED_BYTES, "too little shared memory reserved");

    static __device__ __forceinline__ void run(const HalfParams& p) {
        grid_release();
        extern __shared__ __align__(1024) u8 shared[];
        const int rank = kSplit > 1 ? blockIdx.x % kSplit : 0, tile = blockIdx.x / kSplit;
        const int m = tile % p.token_tiles * kTileTokens, n = tile / p.token_tiles * kColumns;
        const int team = uniform(threadIdx.x / kTeamThreads), t = threadIdx.x % kTeamThreads;
        const int runs = p.k / 128, unit = rank * kTeams + team, units = kSplit * kTeams;

        float acc[kBlocks][4][4] = {};
        const int from = runs * unit / units, to = runs * (unit + 1) / units;
        Source<kHopper> source(p, m, n, from * kSteps, t);
        const u32 received = smem_address(shared) + kBarriersAt, full = received + 8 + team * 8 * kStages;
        if constexpr (kHopper) {
            if (t < kStages) mbar_init(full + 8 * t, 1);
            if (threadIdx.x == 0) mbar_init(received, 1);
            mbar_init_fence();
            if constexpr (kSplit > 1) cluster_arrive();
            if (from < to) source.prefetch();
            __syncthreads();
        }
        grid_wait();
        accumulate(acc, source, shared + team * kRingBytes, full, (to - from) * kSteps, team, t);

        __syncthreads();  // all teams have left their rings
        float* sums = reinterpret_cast<float*>(shared) + team * (kSumsBytes / 4);
        const int warp = t / 32, q = t % 4;
        float* mine = sums + (warp / kColumnWarps * kTokens + 2 * q) * kStride + warp % kColumnWarps * 64;
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
#pragma unroll
            for (int second = 0; second < 2; ++second) Weights::put(mine + (8 * i + second) * kStride, acc[i], second);
        __syncthreads();
        finish(p, shared, received, m, n, rank);
    }

    // What one thread copies into each stage of its team, step after step. Tokens beyond M and columns beyond N stay what
    // they were: their sums are not stored.
    template <bool kBulk, class = void>
    struct Source {
        const u8 *codes, *metadata, *scales, *tokens;
        u64 code_row, metadata_row, scale_row, token_rows;  // bytes between the rows that this thread copies from
        u32 code_at, token_at;
        int thread, valid_tokens;
        bool valid_codes, valid_metadata, valid_scales;

        static constexpr int kChunks = 32 * kColumnWarps;                                  // 16-byte chunks of a row of codes
        static constexpr int kMetadataChunks = 16 * kColumnWarps, kScaleChunks = kColumns * kScaleBytes / 16;
        static constexpr int kPieces = kTokenBytes / 16;                                   // of a token
        static constexpr int kTokensAtOnce = kTeamThreads / kPieces;

        __device__ __forceinline__ Source(const HalfParams& p, int m, int n, int step, int t) : thread(t) {
            const int chunk = t % kChunks, left = p.n - n;
            code_row = static_cast<u64>(p.n) * 8;
            codes = p.qweight + (static_cast<u64>(step) * kRows + t / kChunks) * code_row + n * 8ull + chunk * 16;
            code_at = kCodesAt + t * 16;
            valid_codes = chunk / 32 * 64 < left;

            metadata_row = static_cast<u64>(p.n) * 4;
            metadata = p.metadata + (static_cast<u64>(step) * kMetadataRows + t / kMetadataChunks) * metadata_row + n * 4ull +
                       t % kMetadataChunks * 16;
            valid_metadata = t % kMetadataChunks / 16 * 64 < left;

            scale_row = static_cast<u64>(p.n) * kScaleBytes;
            scales = p.scale + (static_cast<u64>(step / kGroupSteps) * kGroups + t / kScaleChunks) * scale_row +
                     static_cast<u64>(n) * kScaleBytes + t % kScaleChunks * 16;
            valid_scales = t % kScaleChunks * (16 / kScaleBytes) < left;

            const int token = t / kPieces, piece = t % kPieces;
            token_rows = static_cast<u64>(p.k) * (2 * kTokensAtOnce);
            tokens = p.x + (static_cast<u64>(m + token) * p.k + step * kStep) * 2 + piece * 16;
            token_at = token * kTokenBytes + (piece ^ token % 8) * 16;
            valid_tokens = p.m - m - token;
        }

        // Starts the copies of one step; `last` of its group brings the scales.
        __device__ __forceinline__ void load(u32 stage, u32 side, u32, bool last) {
#pragma unroll
            for (int r = 0; r < kRows; r += kTokenWarps)
                if (valid_codes && (kRows % kTokenWarps == 0 || r + thread / kChunks < kRows))
                    copy_async(stage + code_at + r * kChunks * 16, codes + r * code_row);
            codes += kRows * code_row;
            copy_rows<kMetadataRows, kMetadataChunks>(side, metadata, metadata_row, valid_metadata);
            metadata += kMetadataRows * metadata_row;
            if (last) {
                copy_rows<kGroups, kScaleChunks>(side + kMetadataBytes, scales, scale_row, valid_scales);
                scales += kGroups * scale_row;
            }
#pragma unroll
            for (int i = 0; i < kTileTokens; i += kTokensAtOnce)
                if (i < valid_tokens && (kTileTokens % kTokensAtOnce == 0 || i + thread / kPieces < kTileTokens))
                    copy_async(stage + (token_at ^ i % 8 * 16) + i * kTokenBytes, tokens + i / kTokensAtOnce * token_rows);
            tokens += kTokenBytes;
            copy_commit();
        }
        // Where there is nothing to copy any more, so that the groups keep their count.
        static __device__ __forceinline__ void skip() { copy_commit(); }
        static __device__ __forceinline__ void wait(u32, u32) { copy_wait<kStages - 2>(); }

        // kCount rows of kChunks chunks, some of them in each thread.
        template <int kCount, int kRowChunks>
        __device__ __forceinline__ void copy_rows(u32 to, const u8* from, u64 row_bytes, bool valid) const {
            constexpr int kRowsAtOnce = kTeamThreads / kRowChunks > 0 ? kTeamThreads / kRowChunks : 1;
            static_assert(kTeamThreads % kRowChunks == 0, "a thread copies the same chunk of each row");
#pragma unroll
            for (int r = 0; r < kCount; r += kRowsAtOnce)
                if (valid && (kCount % kRowsAtOnce == 0 || r + thread / kRowChunks < kCount))
                    copy_async(to + thread * 16 + r * kRowChunks * 16, from + r * row_bytes);
        }
    };

    // The same by one thread of the team's first warp, as boxes. Beyond M and N they are zeros.
    template <class Void>
    struct Source<true, Void> {
        const HalfParams& p;
        int m, n, step;
        bool issues;

        __device__ __forceinline__ Source(const HalfParams& p, int m, int n, int step, int t)
            : p(p), m(m), n(n), step(step), issues(uniform(t / 32) == 0) {
            if (threadIdx.x == 0) {
                prefetch_map(&p.x_map);
                prefetch_map(&p.codes_map);
                if constexpr (Weights::kSparse) prefetch_map(&p.metadata_map);
                if constexpr (kGroup != 0) prefetch_map(&p.scale_map);
            }
        }
        // The first codes into L2 while the previous kernel of the stream drains; more than one step costs (measured).
        __device__ __forceinline__ void prefetch() const {
            if (issues && elect_one()) tensor_prefetch_l2(&p.codes_map, n, step * kRows);
        }
        __device__ __forceinline__ void load(u32 stage, u32 side, u32 bar, bool last) {
            if (issues && elect_one()) {
                mbar_expect(bar, kStageBytes + kMetadataBytes + (last ? kGroups * kGroupBytes : 0));
                tensor_copy(stage + kCodesAt, &p.codes_map, n, step * kRows, bar);
                tensor_copy(stage, &p.x_map, step * kStep, m, bar);
                if constexpr (Weights::kSparse) tensor_copy(side, &p.metadata_map, n, step * kRows, bar);
                if constexpr (kGroup != 0)
                    if (last) tensor_copy(side + kMetadataBytes, &p.scale_map, n, step / kGroupSteps * kGroups, bar);
            }
            ++step;
        }
        static __device__ __forceinline__ void skip() {}
        static __device__ __forceinline__ void wait(u32 bar, u32 parity) { mbar_wait(bar, parity); }
    };

    static __device__ __forceinline__ void team_barrier(int team) {
        if constexpr (kTeamThreads == 32) __syncwarp();
        else named_barrier(1 + team, kTeamThreads);
    }

    // The sums of `steps` steps.
    static __device__ __forceinline__ void accumulate(float (&acc)[kBlocks][4][4], Source<kHopper>& source, u8* ring, u32 full, int steps,
                                                      int team, int t) {
        const int lane = t % 32, warp = t / 32, column_warp = warp % kColumnWarps, row = warp / kColumnWarps * kTokens + lane % 8;
        const u32 base = smem_address(ring), tokens_at = row * kTokenBytes + (lane / 8 ^ lane % 8) * 16;
        int ahead = 0, slot = 0, filled = 0;  // steps asked for; the stage that is read; the one that is filled
        u32 parity = 0;
        const auto fill = [&] {
            if (ahead < steps) source.load(base + filled * kStageBytes, base + kSideAt + filled * kSideBytes, full + 8 * filled, (ahead + 1) % kGroupSteps == 0);
            else source.skip();
            ++ahead;
            filled = filled + 1 == kStages ? 0 : filled + 1;
        };
#pragma unroll 1
        for (int i = 0; i < kStages - 1; ++i) fill();
        float part[kBlocks][4][4];
#pragma unroll 1
        for (int first = 0; first < steps; first += kUnrolled) {
#pragma unroll
            for (int s = 0; s < kUnrolled; ++s) {
                source.wait(full + 8 * slot, parity);
                team_barrier(team);  // the stage is here, and nobody reads the one before
                fill();
                const u8* stage = ring + slot * kStageBytes;
                const u8* side = ring + kSideAt + slot * kSideBytes;
                const u32 tokens = base + slot * kStageBytes + tokens_at;
                const u8* codes = stage + kCodesAt + column_warp * 512 + lane * 16;
                const u8* metadata = side + column_warp * 256 + lane * 4;
                const u8* scales = side + kMetadataBytes + (column_warp * 64 + lane / 4 * 8) * kScaleBytes;
#pragma unroll(kGroup == 32 ? 1 : kPairs)  // else some of its variants spill
                for (int pair = 0; pair < kPairs; ++pair) {
                    const int in_group = (s * kPairs + pair) % kGroupPairs;
                    if (in_group == 0) clear(part);
                    u32 b[kBlocks][4];
#pragma unroll
                    for (int i = 0; i < kBlocks; ++i) load_matrices(b[i], (tokens ^ pair * 64) + i * 8 * kTokenBytes);
                    Weights::multiply(part, b, codes, 512 * kColumnWarps, metadata, 256 * kColumnWarps, pair);
                    if (in_group == kGroupPairs - 1) promote(acc, part, scales + pair / kGroupPairs * kGroupBytes);
                }
                if (++slot == kStages) slot = 0, parity ^= 1;
            }
        }
        if constexpr (!kHopper) copy_wait<0>();
    }

  private:
    static __device__ __forceinline__ void clear(float (&part)[kBlocks][4][4]) {
#pragma unroll
        for (int i = 0; i < kBlocks; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int r = 0; r < 4; ++r) part[i][j][r] = 0.f;
    }

    // acc += scale * part; the lane's eight scales are those of its rows c, c + 8 of the four fragments.
    static __device__ __forceinline__ void promote(float (&acc)[kBlocks][4][4], const float (&part)[kBlocks][4][4], const u8* scales) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 scale = make_float2(1.f, 1.f);
            if constexpr (kGroup && kScale == kFloat32) {
                scale = reinterpret_cast<const float2*>(scales)[j];
            } else if constexpr (kGroup != 0) {
                const u32 both = reinterpret_cast<const u32*>(scales)[j];
                scale = make_float2(half_as_float(both & 0xFFFF, kScale), half_as_float(both >> 16, kScale));
            }
#pragma unroll
            for (int i = 0; i < kBlocks; ++i)
#pragma unroll
                for (int r = 0; r < 4; ++r) acc[i][j][r] = fmaf(part[i][j][r], r < 2 ? scale.x : scale.y, acc[i][j][r]);
        }
    }

    // Adds the teams' sums in the order of K, then the blocks', and stores them. In a cluster each block sends the others
    // the sums of their shares; nobody waits for more than his own.
    static __device__ __forceinline__ void finish(const HalfParams& p, u8* shared, u32 received, int m, int n, int rank) {
        const int items = min(kTileTokens, p.m - m) * kFours;
        if constexpr (kHopper && kSplit > 1) {
            const u32 inbox = smem_address(shared) + kReceivedAt;
            if (threadIdx.x == 0) mbar_expect(received, max(0, min(kShare, items - rank * kShare)) * (kSplit - 1) * 16);
            cluster_wait();  // for the others to have started
            for (int i = threadIdx.x; i < items; i += kThreads) {
                const int owner = i / kShare;
                if (owner != rank) send(inbox + ((rank - (rank > owner)) * kShare + i % kShare) * 16, received, owner, block_sum(shared, i));
            }
            mbar_wait(received, 0);
            for (int i = rank * kShare + threadIdx.x; i < min(items, (rank + 1) * kShare); i += kThreads) {
                float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int from = 0; from < kSplit; ++from) {
                    const int slot = (from - (from > rank)) * kShare + i % kShare;
                    add(total, from == rank ? block_sum(shared, i) : reinterpret_cast<const float4*>(shared + kReceivedAt)[slot]);
                }
                store(p, total, m, n, i);
            }
        } else {
            for (int i = threadIdx.x; i < items; i += kThreads) {
                const float4 total = block_sum(shared, i);
                const int column = n + i % kFours * 4;
                if constexpr (kSplit == 1) store(p, total, m, n, i);
                else if (column < p.n)
                    *reinterpret_cast<float4*>(p.workspace + (static_cast<u64>(rank) * p.m + m + i / kFours) * p.n + column) = total;
            }
        }
    }

    // The teams' sums of item i: four columns of a token.
    static __device__ __forceinline__ float4 block_sum(const u8* shared, int i) {
        const float4* sums = reinterpret_cast<const float4*>(shared) + i / kFours * (kStride / 4) + i % kFours;
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int team = 0; team < kTeams; ++team) add(total, sums[team * (kSumsBytes / 16)]);
        return total;
    }

    static __device__ __forceinline__ void store(const HalfParams& p, const float4& total, int m, int n, int i) {
        if (n + i % kFours * 4 < p.n) store(p, total, m + i / kFours, n + i % kFours * 4);
    }

    static __device__ __forceinline__ void add(float4& total, const float4& v) {
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }

    static __device__ __forceinline__ void store(const HalfParams& p, const float4& total, int m, int n) {
        float y[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scale = kGroup ? 1.f : load_as_float(p.scale, Weights::channel(n + i), kScale);
            y[i] = fmaf(y[i], scale, p.bias ? load_as_float(p.bias, n + i, p.bias_kind) : 0.f);
        }
        const u64 at = static_cast<u64>(m) * p.n + n;
        if constexpr (kOut == kFloat32) *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(y[0], y[1], y[2], y[3]);
        else *reinterpret_cast<uint2*>(static_cast<u16*>(p.out) + at) = make_uint2(pack_pair<kOut>(y[0], y[1]), pack_pair<kOut>(y[2], y[3]));
    }

  public:
    // The second pass where the split blocks are no cluster: adds their sums in the order of K.
    static __device__ __forceinline__ void add_splits(const HalfParams& p) {
        const u32 fours = p.n / 4, items = p.m * fours, i = blockIdx.x * blockDim.x + threadIdx.x;
        grid_release();
        grid_wait();
        if (i >= items) return;
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int split = 0; split < kSplit; ++split)
            add(total, *reinterpret_cast<const float4*>(p.workspace + (static_cast<u64>(split) * items + i) * 4));
        store(p, total, i / fours, i % fours * 4);
    }
};
