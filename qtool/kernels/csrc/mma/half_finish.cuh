// The end of the 16-bit GEMM (half_gemm.cuh): the sums of the units of K are added up, scaled per
// channel, biased and stored. Floats are added in the order of K, so that the same inputs give the
// same bits.
//
// The teams of a block add up in shared memory. Where kSplit blocks share a tile, there are two
// ways:
//   in a cluster (kHopper) each block owns an equal share of the tile. It sends the others the sums
//   of their shares, into their shared memory, and adds up what it receives for its own;
//   else each block writes its sums to p.workspace, and a second kernel adds them up (add_splits).
//
// Legend: an *item* is a float4, four adjacent columns of a token of the tile; items are counted
// token by token. rank: the number of a block among those of its tile.
#pragma once
#include "mma/half_shape.cuh"

// S: a HalfShape.
template <class S>
struct HalfFinish {
    // Finishes the tile at token m and column n. `shared` holds the teams' sums; all threads of the
    // block have passed a barrier since they were written. `received` is the mbarrier that counts
    // the bytes that the others send here.
    static __device__ __forceinline__ void run(const HalfParams& p, u8* shared, u32 received, int m, int n, int rank) {
        const int items = min(S::kTileTokens, p.m - m) * S::kFours;
        if constexpr (S::kHopper && S::kSplit > 1) {
            const u32 inbox = smem_address(shared) + S::kReceivedAt;
            // The other kSplit - 1 blocks send 16 bytes for each item of this block's share.
            if (threadIdx.x == 0) mbar_expect(received, max(0, min(S::kShare, items - rank * S::kShare)) * (S::kSplit - 1) * 16);
            cluster_wait();  // the others have started, and their mbarriers are initialized
            // Slot s * kShare + j of a block's inbox holds item j of its share from the s-th of the
            // other blocks.
            for (int i = threadIdx.x; i < items; i += S::kThreads) {
                const int owner = i / S::kShare;
                const u32 slot = (rank - (rank > owner)) * S::kShare + i % S::kShare;
                if (owner == rank) continue;
                const float4 sum = block_sum(shared, i);
                send(remote(inbox + slot * 16, owner), remote(received, owner), &sum.x);
            }
            mbar_wait(received, 0);
            for (int i = rank * S::kShare + threadIdx.x; i < min(items, (rank + 1) * S::kShare); i += S::kThreads) {
                float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int from = 0; from < S::kSplit; ++from) {
                    const int slot = (from - (from > rank)) * S::kShare + i % S::kShare;
                    const float4* sent = reinterpret_cast<const float4*>(shared + S::kReceivedAt) + slot;
                    add(total, from == rank ? block_sum(shared, i) : *sent);
                }
                store(p, total, m, n, i);
            }
        } else {
            for (int i = threadIdx.x; i < items; i += S::kThreads) {
                const float4 total = block_sum(shared, i);
                const u64 row = static_cast<u64>(rank) * p.m + m + i / S::kFours;
                const int column = n + i % S::kFours * 4;
                if constexpr (S::kSplit == 1) store(p, total, m, n, i);
                else if (column < p.n) *reinterpret_cast<float4*>(p.workspace + row * p.n + column) = total;
            }
        }
    }

    // The second kernel where the split blocks are no cluster: a thread adds up an item of Y [M, N]
    // in the order of K, which is that of the ranks.
    static __device__ __forceinline__ void add_splits(const HalfParams& p) {
        const u32 fours = p.n / 4, items = p.m * fours, i = blockIdx.x * blockDim.x + threadIdx.x;
        grid_wait();
        grid_release();
        if (i >= items) return;
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
        for (int split = 0; split < S::kSplit; ++split)
            add(total, *reinterpret_cast<const float4*>(p.workspace + (static_cast<u64>(split) * items + i) * 4));
        store(p, total, i / fours, i % fours * 4);
    }

  private:
    // Item i of the block's sum: the teams' sums in the order of K.
    static __device__ __forceinline__ float4 block_sum(const u8* shared, int i) {
        const float4* sums = reinterpret_cast<const float4*>(shared) + i / S::kFours * (S::kStride / 4) + i % S::kFours;
        float4 total = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int team = 0; team < S::kTeams; ++team) add(total, sums[team * (S::kSumsBytes / 16)]);
        return total;
    }

    // Stores item i of the tile at token m and column n, unless it lies beyond N.
    static __device__ __forceinline__ void store(const HalfParams& p, const float4& total, int m, int n, int i) {
        if (n + i % S::kFours * 4 < p.n) store(p, total, m + i / S::kFours, n + i % S::kFours * 4);
    }

    static __device__ __forceinline__ void add(float4& total, const float4& v) {
        total.x += v.x, total.y += v.y, total.z += v.z, total.w += v.w;
    }

    // Y of token m, columns n to n + 3: total * scale + bias, where groups have been scaled
    // already.
    static __device__ __forceinline__ void store(const HalfParams& p, const float4& total, int m, int n) {
        float y[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float scale = S::kGroup ? 1.f : load_as_float(p.scale, S::Weights::channel(n + i), S::kScale);
            y[i] = fmaf(y[i], scale, p.bias ? load_as_float(p.bias, n + i, p.bias_kind) : 0.f);
        }
        const u64 at = static_cast<u64>(m) * p.n + n;
        if constexpr (S::kOut == kFloat32) {
            *reinterpret_cast<float4*>(static_cast<float*>(p.out) + at) = make_float4(y[0], y[1], y[2], y[3]);
        } else {
            const uint2 packed = make_uint2(pack_pair<S::kOut>(y[0], y[1]), pack_pair<S::kOut>(y[2], y[3]));
            *reinterpret_cast<uint2*>(static_cast<u16*>(p.out) + at) = packed;
        }
    }
};
