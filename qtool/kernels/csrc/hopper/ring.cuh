// The ring of shared-memory stages between the producer's copies and the consumers' multiplications.
#pragma once
#include "common/ptx.cuh"

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
template <int kWeightBytes, int kTokenBytes, int kStages>
struct Ring {
    const u8* weights;
    u64 token_operand;
    u32 full, empty;
    Place<kStages> place;
    int previous = -1;

    __device__ __forceinline__ void wait_full() const { mbar_wait(full + 8 * place.slot, place.parity); }
    __device__ __forceinline__ const u8* stage() const { return weights + place.slot * kWeightBytes; }
    __device__ __forceinline__ const u8* previous_stage() const { return weights + previous * kWeightBytes; }
    __device__ __forceinline__ u64 tokens() const { return token_operand + place.slot * (kTokenBytes / 16); }
    __device__ __forceinline__ void advance() {
        previous = place.slot;
        place.advance();
    }
    // One arrival per warp.
    __device__ __forceinline__ void release_previous() {
        if (previous >= 0 && threadIdx.x % 32 == 0) mbar_arrive(empty + 8 * previous);
        previous = -1;
    }
};
