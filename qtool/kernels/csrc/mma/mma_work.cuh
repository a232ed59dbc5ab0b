// Which steps of 128 input channels of which tiles a block multiplies: stream-K over costs (Osama et al., 2023).
//
// All steps of all tiles, one after the other, are cut into as many equal shares as there are blocks. A step costs 1, one
// whose tokens have 8 bits costs 2, since s4 tensor cores are twice as fast. So no SM waits for another's precision,
// nor for a last wave that does not fill the chip: COMET's tile remapping and tile decomposition (section 4.4).
//
// A tile that several blocks share is finished by the block that has its last step. Every block takes its last tile
// first: what it owes to another block is written before that one asks for it, and whoever waits, waits only for
// blocks with lower numbers, which have started.
#pragma once
#include "mma/mma_params.cuh"

struct Place {
    int tile, step;
    __device__ __forceinline__ bool operator<(const Place& o) const { return tile < o.tile || (tile == o.tile && step < o.step); }
};

template <bool kMixed>
struct StreamK {
    const MmaParams& p;
    const u32* mask;  // in shared memory: bit b is eight_bit[b]
    int steps;
    u32 tile_cost;

    // Words of shared memory that `mask` takes: K up to 65536.
    static constexpr int kMaskWords = kMixed ? 16 : 0;

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

    // Of the first `count` steps of a tile.
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

    // Where the share of `block` begins, and that of the one before ends.
    __device__ __forceinline__ Place begin(int block) const {
        const u32 total = p.tiles * tile_cost, share = total / gridDim.x;
        const u32 at = share * block + min(static_cast<u32>(block), total % gridDim.x);
        const int tile = at / tile_cost, rest = at % tile_cost;
        int low = 0, high = steps;  // the first step that begins at or after `rest`
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
