// What a 16-bit GEMM is compiled for, and how its shared memory is laid out.
//
// A block multiplies kColumnWarps * 64 output channels by kTokens * kTokenWarps tokens. Its kTeams teams of warps
// share the sum over K, and so do kSplit blocks: each of these units takes a run of 128s of input channels, through
// its own ring of stages of 64.
//
// Legend: a *column* is an output channel n, a *step* 64 input channels.
#pragma once
#include "mma/weights_marlin.cuh"

struct HalfParams {
    TensorMap x_map, codes_map, metadata_map, scale_map;  // the same tensors, for Hopper's bulk copies
    const u8* x;         // [M, K], 16 bit
    const u8* qweight;   // rows of [N/64] tiles of 512 bytes
    const u8* metadata;  // rows of [N/64] tiles of 256 bytes (2:4), or null
    const u8* scale;     // [G, N] of SCALE, each 64 in the lanes' order; [1, N] in the layout's channel order
    const void* bias;    // [N] of `bias_kind`, or null
    void* out;           // [M, N]
    float* workspace;    // [kSplit, M, N] where no cluster adds the units
    int m, n, k;
    int bias_kind, token_tiles;
};

// kKind: of the tokens. kGroup: input channels that share a scale (32, 64, 128), 0 for all. kHopper: bulk copies fill the
// rings, and the split blocks are a cluster.
template <class Weights_, int kKind_, int kScale_, int kOut_, int kGroup_, int kTokens_, int kTokenWarps_, int kColumnWarps_,
          int kTeams_, int kSplit_, int kStages_, bool kHopper_>
struct HalfShape {
    using Weights = Weights_;
    static constexpr int kKind = kKind_, kScale = kScale_, kOut = kOut_, kGroup = kGroup_, kTokens = kTokens_;
    static constexpr int kTokenWarps = kTokenWarps_, kColumnWarps = kColumnWarps_, kTeams = kTeams_, kSplit = kSplit_;
    static constexpr int kStages = kStages_;
    static constexpr bool kHopper = kHopper_;

    static constexpr int kTeamThreads = 32 * kColumnWarps * kTokenWarps, kThreads = kTeams * kTeamThreads;
    static constexpr int kColumns = 64 * kColumnWarps, kTileTokens = kTokens * kTokenWarps, kBlocks = kTokens / 8;

    static constexpr int kStep = 64, kSteps = 128 / kStep, kPairs = kStep / 32;  // of a run of 128; of 16 inputs in a step
    static constexpr int kRows = kStep / Weights::kInputs, kMetadataRows = Weights::kSparse ? kRows : 0;
    static constexpr int kScaleBytes = kScale == kFloat32 ? 4 : 2;
    static constexpr int kGroups = kGroup ? (kStep > kGroup ? kStep / kGroup : 1) : 0;   // whose scales a stage holds
    static constexpr int kGroupSteps = kGroup > kStep ? kGroup / kStep : 1;              // the last of which has them
    static constexpr int kGroupPairs = kGroup ? kGroup / 32 : 4;                         // added up before they are scaled
    static constexpr int kUnrolled = kGroupPairs > kPairs ? kGroupPairs / kPairs : 1;    // steps of a group

    // A ring: stages of tokens and codes, aligned for swizzled copies, then stages of metadata and scales.
    static constexpr int kTokenBytes = kStep * 2, kCodeBytes = kRows * 512 * kColumnWarps;
    static constexpr int kMetadataBytes = kMetadataRows * 256 * kColumnWarps, kGroupBytes = kColumns * kScaleBytes;
    static constexpr int kCodesAt = kTileTokens * kTokenBytes, kStageBytes = kCodesAt + kCodeBytes;
    static constexpr int kSideAt = kStages * kStageBytes, kSideBytes = kMetadataBytes + kGroups * kGroupBytes;
    static constexpr int kRingBytes = (kSideAt + kStages * kSideBytes + 1023) / 1024 * 1024;
    static_assert(kStageBytes % 1024 == 0, "a swizzled token lies at a multiple of 8 of them");

    static constexpr int kStride = kColumns + 4;  // floats of a token's sums; the 4 spread the banks
    static constexpr int kSumsBytes = kTileTokens * kStride * 4;
    static_assert(kStages >= 2, "one stage is filled while another is read");
    // A cluster's blocks finish equal shares of the tile, four columns of a token at a time: what the others send here.
    static constexpr int kFours = kColumns / 4, kShare = (kTileTokens * kFours + kSplit - 1) / kSplit;
    static constexpr int kReceivedAt = kTeams * (kRingBytes > kSumsBytes ? kRingBytes : kSumsBytes);
    static constexpr int kBarriersAt = kReceivedAt + (kHopper ? (kSplit - 1) * kShare * 16 : 0);
    static_assert(kBarriersAt + (kHopper ? 8 * (kTeams * kStages + 1) : 0) <= SHARED_BYTES, "too little shared memory reserved");
};
