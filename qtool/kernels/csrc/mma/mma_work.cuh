// Which steps of 128 input channels of which tiles a block multiplies: stream-K (Osama et al.,
// 2023), with a cost for each step.
//
// Put all steps of all tiles one after another, tile by tile, and cut this sequence into as many
// shares of equal cost as there are blocks. A step costs 1; a step whose tokens have 8 bits costs
// 2, since the s4 tensor cores are twice as fast as those for s8. So no multiprocessor is late
// because its tokens have more bits, and none is idle because the last tiles do not fill the GPU.
// This does what COMET's tile remapping and tile decomposition are for (section 4.4).
//
// A share may begin and end inside a tile. If several blocks share a tile, the one with the tile's
// last step adds the others' sums to its own and stores the tile. Every block takes its tiles in
// descending order: the sums that another block needs belong to its last tile, so they are written
// first, and a block that waits for sums does so in its first tile, at its end. It waits for blocks
// with lower numbers only; the host makes no more blocks than the GPU holds at once if tiles are
// shared (qtool/kernels/mma/gemm.py).
#pragma once
#include "mma/mma_params.cuh"

// A step of a tile; step 0 of the next tile stands for the end of a tile.
struct Place {
    int tile, step;
    __device__ __forceinline__ bool operator<(const Place& o) const { return tile < o.tile || (tile == o.tile && step < o.step); }
};

// kMixed: some steps have tokens of 8 bits, those that p.eight_bit marks; else all steps cost 1.
template <bool kMixed>
struct StreamK {
    const MmaParams& p;
    const u32* mask;  // in shared memory: bit b % 32 of word b / 32 is eight_bit[b]
    int steps;        // of a tile
    u32 tile_cost;    // of all its steps; the same for each tile, since all have the same K

    // Words of shared memory that `mask` takes: 512 steps, K up to 65536, which the op sees to.
    static constexpr int kMaskWords = kMixed ? 16 : 0;

    // All threads of the block call it: they fill `mask` together.
    __device__ __forceinline__ StreamK(const MmaParams& p, u32* mask) : p(p), mask(mask), steps((p.k + 127) / 128) {
        if constexpr (kMixed) {
            if (threadIdx.x < kMaskWords) {
                u32 word = 0;
                for (int i = 0; i < 32; ++i) {
                    const int b = 32 * threadIdx.x + i;
                    if (b < steps && p.eight_bit[b]) word |= 1u << i;
                }
                mask[threadIdx.x] = word;
            }
            __syncthreads();
        }
        tile_cost = cost(steps);
    }

    __device__ __forceinline__ bool eight_bit(int step) const { return kMixed && (mask[step / 32] >> (step % 32) & 1); }

    // The cost of the first `count` steps of a tile: each counts once, and once more if its bit is
    // set.
    __device__ __forceinline__ int cost(int count) const {
        int sum = count;
        if constexpr (kMixed) {
            for (int i = 0; 32 * i < count; ++i) {
                const int bits = count - 32 * i;
                sum += __popc(bits < 32 ? mask[i] & ((1u << bits) - 1) : mask[i]);
            }
        }
        return sum;
    }

    // Where the share of `block` begins, and that of the block before ends. The first
    // total % gridDim.x shares cost 1 more than the others. A boundary inside a step of cost 2
    // moves to the next step, so a share may cost 1 more or less, or be empty.
    __device__ __forceinline__ Place begin(int block) const {
        const u32 total = p.tiles * tile_cost, share = total / gridDim.x;
        const u32 at = share * block + min(static_cast<u32>(block), total % gridDim.x);
        const int tile = at / tile_cost, rest = at % tile_cost;
        // The search ends with `low` the first step before which the steps cost `rest` or more.
        int low = 0, high = steps;
        if constexpr (kMixed) {
            while (low < high) {
                const int middle = (low + high) / 2;
                if (cost(middle) < rest) low = middle + 1;
                else high = middle;
            }
        } else {
            low = rest;
        }
        return low == steps ? Place{tile + 1, 0} : Place{tile, low};
    }
};
