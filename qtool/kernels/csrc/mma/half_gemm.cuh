// The 16-bit GEMM: Y^T = W X^T for 4-bit weights and 16-bit tokens by mma.sync (sm_80 and newer),
// float32 sums in a fixed order. half_shape.cuh has the legend and the tile of a block.
//
// A block computes one tile, or its part of the sum over K: block kSplit * tile + rank. The tiles
// of the first kColumns output channels come first, one for each kTileTokens tokens. A warp owns 64
// output channels and kTokens tokens, and the input channels of its team. Each team runs through
// its input channels by itself and waits for no other team. At the end all teams put their sums
// into shared memory, and half_finish.cuh adds them in the order of K and stores them.
//
// Products are exact: the left operand is code - 8, which 16 bits hold exactly. Tensor cores
// truncate when they add, so no more than 128 inputs are added up by them: each group's sum is then
// multiplied by its scale in float32 and added to the total. Without groups this is done every 128
// inputs, with 1 for the scale. So no weight is rounded to 16 bits.
#pragma once
#include "mma/half_finish.cuh"
#include "mma/half_source.cuh"

// BulkSource if kBulk, else AsyncSource.
template <bool kBulk, class S>
struct ChooseSource {
    using Type = AsyncSource<S>;
};
template <class S>
struct ChooseSource<true, S> {
    using Type = BulkSource<S>;
};

// S: a HalfShape.
template <class S>
struct HalfGemm {
    using Source = typename ChooseSource<S::kHopper, S>::Type;
    // Of a lane: [block of 8 tokens][fragment of 16 columns][register], as d of half_mma.cuh.
    using Sums = float[S::kTokens / 8][4][4];

    // The whole kernel. t is the thread's number in its team.
    static __device__ __forceinline__ void run(const HalfParams& p) {
        extern __shared__ __align__(1024) u8 shared[];
        const int rank = S::kSplit > 1 ? blockIdx.x % S::kSplit : 0, tile = blockIdx.x / S::kSplit;
        const int m = tile % p.token_tiles * S::kTileTokens, n = tile / p.token_tiles * S::kColumns;
        const int team = uniform(threadIdx.x / S::kTeamThreads), t = threadIdx.x % S::kTeamThreads;
        // The 128s of input channels are dealt out to the units in order, as evenly as they go.
        const int runs = p.k / 128, unit = rank * S::kTeams + team, units = S::kSplit * S::kTeams;

        Sums acc = {};
        const int from = runs * unit / units, to = runs * (unit + 1) / units;
        Source source(p, m, n, from * S::kSteps, t);
        const u32 received = smem_address(shared) + S::kBarriersAt, full = received + 8 + team * 8 * S::kStages;
        if constexpr (S::kHopper) {
            if (t < S::kStages) mbar_init(full + 8 * t, 1);
            if (threadIdx.x == 0) mbar_init(received, 1);
            mbar_init_fence();
            if constexpr (S::kSplit > 1) cluster_arrive();  // for cluster_wait of half_finish.cuh
            if (from < to) source.prefetch();
            __syncthreads();
        }
        grid_wait();
        grid_release();
        accumulate(acc, source, shared + team * S::kRingBytes, full, (to - from) * S::kSteps, (runs + units - 1) / units * S::kSteps, team, t);

        __syncthreads();  // all teams have left their rings, where the sums go
        float* sums = reinterpret_cast<float*>(shared) + team * (S::kSumsBytes / 4);
        const int warp = t / 32, q = t % 4;
        float* mine = sums + (warp / S::kColumnWarps * S::kTokens + 2 * q) * S::kStride + warp % S::kColumnWarps * 64;
#pragma unroll
        for (int i = 0; i < S::kBlocks; ++i)
#pragma unroll
            for (int second = 0; second < 2; ++second) S::Weights::put(mine + (8 * i + second) * S::kStride, acc[i], second);
        __syncthreads();
        HalfFinish<S>::run(p, shared, received, m, n, rank);
    }

  private:
    // A barrier of the team's threads: for one warp __syncwarp, else a named barrier; 0 is that of
    // __syncthreads.
    static __device__ __forceinline__ void team_barrier(int team) {
        if constexpr (S::kTeamThreads == 32) __syncwarp();
        else named_barrier(1 + team, S::kTeamThreads);
    }

    // Adds the scaled sums of the team's `steps` steps to `acc`; no team has more than `most`.
    // `ring` is the team's ring, `full` the mbarrier of its first stage (kHopper). kStages - 1
    // steps are under way ahead of the one at hand.
    static __device__ __forceinline__ void accumulate(Sums& acc, Source& source, u8* ring, u32 full, int steps, int most, int team, int t) {
        const int lane = t % 32, warp = t / 32, column_warp = warp % S::kColumnWarps;
        const int row = warp / S::kColumnWarps * S::kTokens + lane % 8;
        // Where this lane's row of the first ldmatrix lies in a stage: token lane % 8 of its warp,
        // 8 inputs (16 bytes) of matrix lane / 8, swizzled. The four matrices are the 32 inputs of
        // pair 0; those of pair 1 lie 64 bytes further, which in the swizzled row is an XOR by 64.
        // Later blocks of tokens lie 1024 bytes further.
        const u32 base = smem_address(ring), tokens_at = row * S::kTokenBytes + (lane / 8 ^ lane % 8) * 16;
        // `ahead`: steps whose copies have been started. `slot`: the stage that is read. `filled`:
        // the stage that is filled next.
        int ahead = 0, slot = 0, filled = 0;
        u32 parity = 0;
        const auto fill = [&] {
            const u32 stage = base + filled * S::kStageBytes, side = base + S::kSideAt + filled * S::kSideBytes;
            if (ahead < steps) source.load(stage, side, full + 8 * filled, (ahead + 1) % S::kGroupSteps == 0);
            else source.skip();
            ++ahead;
            filled = filled + 1 == S::kStages ? 0 : filled + 1;
        };
#pragma unroll 1
        for (int i = 0; i < S::kStages - 1; ++i) fill();
        Sums part;
#pragma unroll 1
        for (int first = 0; first < steps; first += S::kUnrolled) {
#pragma unroll
            for (int s = 0; s < S::kUnrolled; ++s) {
                // After the barrier the whole team's copies of this stage have arrived, and no warp
                // reads the stage of the step before any more: it is the one that is filled next.
                source.wait(full + 8 * slot, parity);
                team_barrier(team);
                fill();
                const u8* stage = ring + slot * S::kStageBytes;
                const u8* side = ring + S::kSideAt + slot * S::kSideBytes;
                const u32 tokens = base + slot * S::kStageBytes + tokens_at;
                // This lane's 16 bytes of its warp's first tile of codes, its word of the first
                // tile of metadata, and its eight scales of the first group of the stage.
                const u8* codes = stage + S::kCodesAt + column_warp * 512 + lane * 16;
                const u8* metadata = side + column_warp * 256 + lane * 4;
                const u8* scales = side + S::kMetadataBytes + (column_warp * 64 + lane / 4 * 8) * S::kScaleBytes;
                // Unrolled, some variants with groups of 32 would spill.
#pragma unroll(S::kGroup == 32 ? 1 : S::kPairs)
                for (int pair = 0; pair < S::kPairs; ++pair) {
                    const int in_group = (s * S::kPairs + pair) % S::kGroupPairs;
                    if (in_group == 0) clear(part);
                    u32 b[S::kBlocks][4];
#pragma unroll
                    for (int i = 0; i < S::kBlocks; ++i) load_matrices(b[i], (tokens ^ pair * 64) + i * 8 * S::kTokenBytes);
                    S::Weights::multiply(part, b, codes, 512 * S::kColumnWarps, metadata, 256 * S::kColumnWarps, pair);
                    if (in_group == S::kGroupPairs - 1) promote(acc, part, scales + pair / S::kGroupPairs * S::kGroupBytes);
                }
                if (++slot == S::kStages) slot = 0, parity ^= 1;
            }
        }
        // Teams with fewer steps pass as many barriers: compute-sanitizer's racecheck orders
        // accesses by the barriers that a thread has passed.
        for (int i = steps; i < most; ++i) team_barrier(team);
        if constexpr (!S::kHopper) async_wait<0>();
    }

    static __device__ __forceinline__ void clear(Sums& part) {
#pragma unroll
        for (int i = 0; i < S::kBlocks; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int r = 0; r < 4; ++r) part[i][j][r] = 0.f;
    }

    // acc += scale * part. `scales`: this lane's eight scales of the group, of rows c and c + 8 of
    // each of the four fragments; the layouts store them in this order (group_order of
    // qtool/layouts/marlin.py and marlin_24.py).
    static __device__ __forceinline__ void promote(Sums& acc, const Sums& part, const u8* scales) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 scale = make_float2(1.f, 1.f);
            if constexpr (S::kGroup && S::kScale == kFloat32) {
                scale = reinterpret_cast<const float2*>(scales)[j];
            } else if constexpr (S::kGroup != 0) {
                const u32 both = reinterpret_cast<const u32*>(scales)[j];
                scale = make_float2(half_as_float(both & 0xFFFF, S::kScale), half_as_float(both >> 16, S::kScale));
            }
#pragma unroll
            for (int i = 0; i < S::kBlocks; ++i)
#pragma unroll
                for (int r = 0; r < 4; ++r) acc[i][j][r] = fmaf(part[i][j][r], r < 2 ? scale.x : scale.y, acc[i][j][r]);
        }
    }
};
