// The ring of shared-memory stages between the producer's copies and the consumers'
// multiplications. Each stage has two mbarriers (common/ptx.cuh): `full` is completed when its
// copies have arrived, `empty` when all consumer warps have left it. Consumers wait for `full` with
// the parity below, producers for `empty` with the other parity, so that their first round does not
// wait.
#pragma once
#include "common/ptx.cuh"

// A place in the ring, and the parity of its `full` barrier's phase, which changes with each round.
template <int kStages>
struct Place {
    int slot = 0;
    u32 parity = 0;
    __device__ __forceinline__ void advance() {
        if (++slot == kStages) slot = 0, parity ^= 1;
    }
};

// A consumer warp's view. wgmma reads a stage asynchronously, so a stage is given back one step
// later: `previous` is the one before, or -1 if there is none that is still held.
template <int kWeightBytes, int kTokenBytes, int kStages>
struct Ring {
    const u8* weights;    // of the first stage
    u64 token_operand;    // descriptor of the first stage's tokens; it counts 16 bytes
    u32 full, empty;      // the first stage's barriers
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
    // Gives the stage before back: one arrival per warp. The warp's wgmma on it must be done.
    __device__ __forceinline__ void release_previous() {
        if (previous >= 0 && threadIdx.x % 32 == 0) mbar_arrive(empty + 8 * previous);
        previous = -1;
    }
};
