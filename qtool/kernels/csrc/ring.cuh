// The ring of shared-memory stages between the producer's copies and the consumers' multiplications.
#pragma once
#include "ptx.cuh"

// A place in the ring and the parity of the barriers there.
template <int kStages>
struct Place {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == kStages) slot = 0, parity ^= 1;
    }
};

// A consumer warp's view.
template <class Weights, int kTokens, int kStages, int kRows>
struct Ring {
    const u8* weights;
    u64 token_operand;
    u32 full, empty;
    u32 first_peer;  // rank of the first block that shares the tokens
    Place<kStages> place;
    int previous = -1;

    __device__ __forceinline__ void wait_full() const { mbar_wait(full + 8 * place.slot, place.parity); }
    __device__ __forceinline__ const u8* stage() const { return weights + place.slot * Weights::kStageBytes; }
    __device__ __forceinline__ const u8* previous_stage() const { return weights + previous * Weights::kStageBytes; }
    __device__ __forceinline__ u64 tokens() const { return token_operand + place.slot * (kTokens * 128 / 16); }
    __device__ __forceinline__ void advance() {
        previous = place.slot;
        place.advance();
    }
    // One arrival per warp at every block whose producer fills this slot.
    __device__ __forceinline__ void release_previous() {
        const u32 lane = threadIdx.x % 32;
        if (previous >= 0) {
            if constexpr (kRows == 1) {
                if (lane == 0) mbar_arrive(empty + 8 * previous);
            } else if (lane < kRows) {
                mbar_arrive_at(empty + 8 * previous, first_peer + lane);
            }
        }
        previous = -1;
    }
};
