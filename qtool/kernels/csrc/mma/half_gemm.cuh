// Y^T = W X^T for 4-bit weights and 16-bit tokens on mma.sync (sm_80 and newer), float32 sums in a fixed order.
//
// A team of warps waits for nobody but itself until the end, when all units of K put their sums into shared memory and
// each thread adds, in the order of K, those it stores.
//
// Exact products: the operand is code - 8, which 16 bits hold exactly. A group's sum is scaled in float32 and added
// to the total (without groups: every 128 inputs, unscaled), so that no weight is rounded and the tensor cores'
// truncating additions stay within 128 terms.
#pragma once
#include "mma/half_finish.cuh"
#include "mma/half_source.cuh"

template <bool kBulk, class S>
struct ChooseSource {
    using Type = AsyncSource<S>;
};
template <class S>
struct ChooseSource<true, S> {
    using Type = BulkSource<S>;
};

template <class S>
struct HalfGemm {
    using Source = typename ChooseSource<S::kHopper, S>::Type;
    using Sums = float[S::kTokens / 8][4][4];  // of a lane: blocks of 8 tokens, fragments of 16 columns

    static __device__ __forceinline__ void run(const HalfParams& p) {
        extern __shared__ __align__(1024) u8 shared[];
        const int rank = S::kSplit > 1 ? blockIdx.x % S::kSplit : 0, tile = blockIdx.x / S::kSplit;
        const int m = tile % p.token_tiles * S::kTileTokens, n = tile / p.token_tiles * S::kColumns;
        const int team = uniform(threadIdx.x / S::kTeamThreads), t = threadIdx.x % S::kTeamThreads;
        const int runs = p.k / 128, unit = rank * S::kTeams + team, units = S::kSplit * S::kTeams;

        Sums acc = {};
        const int from = runs * unit / units, to = runs * (unit + 1) / units;
        Source source(p, m, n, from * S::kSteps, t);
        const u32 received = smem_address(shared) + S::kBarriersAt, full = received + 8 + team * 8 * S::kStages;
        if constexpr (S::kHopper) {
            if (t < S::kStages) mbar_init(full + 8 * t, 1);
            if (threadIdx.x == 0) mbar_init(received, 1);
            mbar_init_fence();
            if constexpr (S::kSplit > 1) cluster_arrive();
            if (from < to) source.prefetch();
            __syncthreads();
        }
        grid_wait();
        grid_release();
        accumulate(acc, source, shared + team * S::kRingBytes, full, (to - from) * S::kSteps, (runs + units - 1) / units * S::kSteps, team, t);

        __syncthreads();  // all teams have left their rings
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
    static __device__ __forceinline__ void team_barrier(int team) {
        if constexpr (S::kTeamThreads == 32) __syncwarp();
        else named_barrier(1 + team, S::kTeamThreads);
    }

    // The sums of `steps` steps; no team has more than `most`.
    static __device__ __forceinline__ void accumulate(Sums& acc, Source& source, u8* ring, u32 full, int steps, int most, int team, int t) {
        const int lane = t % 32, warp = t / 32, column_warp = warp % S::kColumnWarps;
        const int row = warp / S::kColumnWarps * S::kTokens + lane % 8;
        const u32 base = smem_address(ring), tokens_at = row * S::kTokenBytes + (lane / 8 ^ lane % 8) * 16;
        int ahead = 0, slot = 0, filled = 0;  // steps asked for; the stage that is read; the one that is filled
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
                source.wait(full + 8 * slot, parity);
                team_barrier(team);  // the stage is here, and nobody reads the one before
                fill();
                const u8* stage = ring + slot * S::kStageBytes;
                const u8* side = ring + S::kSideAt + slot * S::kSideBytes;
                const u32 tokens = base + slot * S::kStageBytes + tokens_at;
                const u8* codes = stage + S::kCodesAt + column_warp * 512 + lane * 16;
                const u8* metadata = side + column_warp * 256 + lane * 4;
                const u8* scales = side + S::kMetadataBytes + (column_warp * 64 + lane / 4 * 8) * S::kScaleBytes;
#pragma unroll(S::kGroup == 32 ? 1 : S::kPairs)  // else some of its variants spill
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
        for (int i = steps; i < most; ++i) team_barrier(team);  // racecheck orders accesses by the barriers a thread has passed
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

    // acc += scale * part; the lane's eight scales are those of its rows c, c + 8 of the four fragments.
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
