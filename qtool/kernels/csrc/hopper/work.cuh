// Which tiles, and which steps of 128 input channels of each, a block multiplies.
#pragma once
#include "hopper/params.cuh"

struct Segment {
    int tile, from, to;  // steps [from, to) of the tile
    bool shared;         // with the other blocks of the cluster
};

// A cluster takes tiles in strides of the grid and deals them out to its blocks whole, as far as they go evenly; of one that
// is left over they share the steps. More are never left: clusters of three and more have one tile (the host sees to it).
// It comes first, so that its sums are exchanged while the ring is full, or (kSharedFirst) last.
template <int kSplit, bool kSharedFirst>
struct Work {
    int cluster, clusters, rank, steps;
    int count, done = 0;  // tiles of the cluster, and those behind this block
    __device__ __forceinline__ Work(const Params& p, u32 split_rank)
        : cluster(blockIdx.x / kSplit), clusters(gridDim.x / kSplit), rank(split_rank), steps((p.k + 127) / 128),
          count((p.tiles - cluster + clusters - 1) / clusters) {}
    __device__ __forceinline__ bool shares() const { return count % kSplit != 0; }
    __device__ __forceinline__ bool next(Segment& s) {
        if (done == count) return false;
        const bool shared = kSplit > 1 && (kSharedFirst ? done < count % kSplit : done + kSplit > count);
        const int tile = cluster + (shared ? done : done + rank) * clusters;
        s = {tile, shared ? steps * rank / kSplit : 0, shared ? steps * (rank + 1) / kSplit : steps, shared};
        done += shared ? 1 : kSplit;
        return true;
    }
};
