// Sorts the pairs of a token and an expert that it goes to by expert: a counting sort by one block, stable, so that each run
// gives the same order. A warp counts the experts of its share of the pairs. Its own pairs of an expert go behind the pairs
// of all experts before that one and behind those that the warps before it have counted for that expert.
//
// It never calls grid_release: a GEMM may read the offsets before its own grid_wait. The host defines THREADS.
#include "common/ptx.cuh"

struct Params {
    const int* ids;  // [pairs] expert of each pair
    const int* map;  // [mapped] this rank's number of each id, or null: the id; a number of no expert is left out
    int* offsets;    // [experts + 1] first row of each expert, and the end
    int* place;      // [pairs] row of each pair, -1 if it is left out
    int pairs, experts, mapped;
};

constexpr int kWarps = THREADS / 32, kBatch = 4;

// The lanes whose expert is the same as this one's: `bits` votes, which are faster than match.any.
__device__ __forceinline__ u32 alike(int expert, int bits) {
    u32 lanes = 0xFFFFFFFF;
    for (int b = 0; b < bits; ++b) {
        const bool one = expert >> b & 1;
        const u32 ones = __ballot_sync(0xFFFFFFFF, one);
        lanes &= one ? ones : ~ones;
    }
    return lanes;
}

// The experts of pairs [from + 32 i + lane], p.experts for none.
__device__ __forceinline__ void read(int (&expert)[kBatch], const Params& p, int from, int to) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
        const int at = from + 32 * i + threadIdx.x % 32;
        expert[i] = at < to ? p.ids[at] : -1;
    }
    if (p.map) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) expert[i] = static_cast<u32>(expert[i]) < p.mapped ? p.map[expert[i]] : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) expert[i] = static_cast<u32>(expert[i]) < p.experts ? expert[i] : p.experts;
}

extern "C" __global__ void __launch_bounds__(THREADS) route(const __grid_constant__ Params p) {
    extern __shared__ int shared[];
    int* first = shared;                        // [experts]
    int* sums = first + p.experts;              // [warp]
    const int lane = threadIdx.x % 32, warp = uniform(threadIdx.x / 32);
    int* counts = sums + kWarps;                // [warp][expert]
    int* own = counts + warp * p.experts;
    const int share = ((p.pairs + kWarps - 1) / kWarps + 31) / 32 * 32;
    const int from = min(warp * share, p.pairs), to = min(from + share, p.pairs);
    for (int e = lane; e < p.experts; e += 32) own[e] = 0;
    grid_wait();
    __syncwarp();

    const int bits = 32 - __clz(p.experts);
    int expert[kBatch];
    for (int at = from; at < to; at += 32 * kBatch) {
        read(expert, p, at, to);
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (expert[i] < p.experts) atomicAdd(own + expert[i], 1);
    }
    __syncthreads();

    int total = 0;
    if (threadIdx.x < p.experts) {
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
            int* count = counts + w * p.experts + threadIdx.x;
            const int here = *count;
            *count = total;
            total += here;
        }
    }
    int until = total;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(0xFFFFFFFF, until, step);
        if (lane >= step) until += before;
    }
    if (lane == 31) sums[warp] = until;
    __syncthreads();
    for (int w = 0; w < warp; ++w) until += sums[w];
    if (threadIdx.x < p.experts) first[threadIdx.x] = p.offsets[threadIdx.x] = until - total;
    if (threadIdx.x == p.experts - 1) p.offsets[p.experts] = until;
    __syncthreads();

    for (int at = from; at < to; at += 32 * kBatch) {
        read(expert, p, at, to);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int pair = at + 32 * i + lane;
            const bool valid = expert[i] < p.experts;
            const u32 same = alike(expert[i], bits);
            const int row = valid ? first[expert[i]] + own[expert[i]] + __popc(same & ((1u << lane) - 1)) : -1;
            __syncwarp();
            if (valid && lane == __ffs(same) - 1) own[expert[i]] += __popc(same);
            __syncwarp();
            if (pair < to) p.place[pair] = row;
        }
    }
}
