// The tiles that a block multiplies, and the steps of kInputs input channels of each.
#pragma once
#include "hopper/params.cuh"

// A tile: output channels from `row` of the weight on, which stand in the output from `column` on,
// and tokens from `token` on and before `end`.
struct Area {
    int row, column, token, end;
};

// The tiles of one weight: the tiles of its first rows, one for each kTokens tokens, then those of
// the next rows.
template <int kTokens, int kRows>
struct OneWeight {
    static constexpr int kBytes = 0;  // of shared memory
    const Params& p;
    __device__ __forceinline__ OneWeight(const Params& p, u8*) : p(p) {}
    __device__ __forceinline__ void prepare() const {}
    __device__ __forceinline__ int tiles() const { return p.tiles; }
    __device__ __forceinline__ int columns() const { return p.n; }
    __device__ __forceinline__ Area area(int tile) const {
        const int row = tile / p.token_tiles * kRows;
        return {row, row, tile % p.token_tiles * kTokens, p.m};
    }
};

// The tiles of a mixture's experts, [E, N, K], each weight with the tokens that were sorted to it:
// expert after expert, in the same order within. Only the device knows how many tokens each has.
template <int kTokens, int kRows>
struct EachExpert {
    static constexpr int kMost = 512, kThreads = 384;
    static constexpr int kBytes = 4 * (2 * (kMost + 1) + kThreads / 32);
    const Params& p;
    int *first_token, *first_tile;  // [E + 1], in token tiles: of the first rows alone
    int* sums;                      // of each warp
    __device__ __forceinline__ EachExpert(const Params& p, u8* shared)
        : p(p), first_token(reinterpret_cast<int*>(shared)), first_tile(first_token + kMost + 1), sums(first_tile + kMost + 1) {}

    // Counts the tiles, two experts a thread. All threads call it, before their next barrier. The
    // offsets were written before the preceding kernel, or by it, and then it has ended, since it
    // never calls grid_release.
    __device__ __forceinline__ void prepare() const {
        const int e = 2 * threadIdx.x, lane = threadIdx.x % 32;
        int at[3], tiles[2];
#pragma unroll
        for (int i = 0; i < 3; ++i) at[i] = __ldcg(p.offsets + min(e + i, p.experts));
#pragma unroll
        for (int i = 0; i < 2; ++i) tiles[i] = (at[i + 1] - at[i] + kTokens - 1) / kTokens;
        int until = tiles[0] + tiles[1];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int before = __shfl_up_sync(0xFFFFFFFF, until, step);
            if (lane >= step) until += before;
        }
        if (lane == 31) sums[threadIdx.x / 32] = until;
        __syncthreads();
        for (int warp = 0; warp < threadIdx.x / 32; ++warp) until += sums[warp];
        const int before[2] = {until - tiles[0] - tiles[1], until - tiles[1]};
#pragma unroll
        for (int i = 0; i < 2; ++i)
            if (e + i <= p.experts) first_token[e + i] = at[i], first_tile[e + i] = before[i];
    }
    __device__ __forceinline__ int row_tiles() const { return (p.columns + kRows - 1) / kRows; }
    __device__ __forceinline__ int tiles() const { return first_tile[p.experts] * row_tiles(); }
    __device__ __forceinline__ int columns() const { return p.columns; }
    __device__ __forceinline__ Area area(int tile) const {
        const int at = tile / row_tiles();
        int expert = 0, end = p.experts;
        while (end - expert > 1) {
            const int middle = (expert + end) / 2;
            if (first_tile[middle] <= at) expert = middle;
            else end = middle;
        }
        const int own = tile - first_tile[expert] * row_tiles(), token_tiles = first_tile[expert + 1] - first_tile[expert];
        const int column = own / token_tiles * kRows;
        return {expert * p.columns + column, column, first_token[expert] + own % token_tiles * kTokens, first_token[expert + 1]};
    }
};

// What a block multiplies without a break.
struct Segment {
    int tile, from, to;  // steps [from, to) of the tile
    bool shared;         // with the other blocks of the cluster
};

// A cluster takes tiles in strides of the grid and deals them out to its blocks whole, as far as
// they go evenly; of one that is left over they share the steps. More are never left: clusters of
// three and more have one tile (the host sees to it). With kSharedFirst the shared tile comes
// first, so that its sums are exchanged while the ring is full; else it comes last.
template <int kSplit, bool kSharedFirst, int kInputs>
struct Work {
    int cluster, clusters, rank, steps;
    int count, done = 0;  // tiles of the cluster, and those behind this block
    __device__ __forceinline__ Work(const Params& p, int tiles, u32 split_rank)
        : cluster(blockIdx.x / kSplit), clusters(gridDim.x / kSplit), rank(split_rank), steps((p.k + kInputs - 1) / kInputs),
          count((tiles - cluster + clusters - 1) / clusters) {}
    // Whether the blocks of the cluster share a tile.
    __device__ __forceinline__ bool shares() const { return count % kSplit != 0; }
    // The block's next segment; false after the last.
    __device__ __forceinline__ bool next(Segment& s) {
        if (done == count) return false;
        const bool shared = kSplit > 1 && (kSharedFirst ? done < count % kSplit : done + kSplit > count);
        const int tile = cluster + (shared ? done : done + rank) * clusters;
        s = {tile, shared ? steps * rank / kSplit : 0, shared ? steps * (rank + 1) / kSplit : steps, shared};
        done += shared ? 1 : kSplit;
        return true;
    }
};
