// Which tiles, and which steps of 128 input channels of each, a block multiplies.
#pragma once
#include "params.cuh"

struct Segment {
    int tile, from, to;  // steps [from, to) of the tile
};

// Whole tiles in strides of the grid; a cluster's split blocks share their steps.
template <int kRows, int kSplit>
struct Work {
    int tile, stride, from, to;
    __device__ __forceinline__ Work(const Params& p, u32 split_rank) {
        const int steps = (p.k + 127) / 128;
        from = steps * split_rank / kSplit, to = steps * (split_rank + 1) / kSplit;
        tile = blockIdx.x / (kRows * kSplit), stride = gridDim.x / (kRows * kSplit);
    }
    __device__ __forceinline__ bool next(const Params& p, Segment& s) {
        if (tile >= p.tiles) return false;
        s = {tile, from, to};
        tile += stride;
        return true;
    }
};
