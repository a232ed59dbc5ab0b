// What the 16-bit GEMM (half_gemm.cuh) is compiled for, its parameters, and how its shared memory
// is laid out.
//
// A block multiplies kColumnWarps * 64 output channels by kTokens * kTokenWarps tokens. Its warps
// form kTeams teams of kColumnWarps x kTokenWarps. The teams share the sum over K, and so do the
// kSplit blocks of one tile: each of these kTeams * kSplit *units* takes its own run of input
// channels, a whole number of 128s, through its own ring of stages.
//
// Legend: M tokens, N output channels, K input channels, G groups of K that have their own scales;
// a *column* is an output channel n, a *step* 64 input channels, a *stage* the part of a ring that
// holds one; a *pair* is 32 inputs, two instructions of 16 (dense) or one of 32 (sparse); a *block*
// of tokens is 8.
#pragma once
#include "mma/weights_marlin.cuh"

// `qtool/kernels/mma/half_gemm.py` packs the same fields in the same order.
struct HalfParams {
    TensorMap x_map, codes_map, metadata_map, scale_map;  // of the same tensors; kHopper only
    const u8* x;         // [M, K] of kKind
    const u8* qweight;   // [K / Weights::kInputs, N/64] tiles of 512 bytes
    const u8* metadata;  // [K/32, N/64] tiles of 256 bytes (2:4 sparse), or null
    const u8* scale;     // [G, N] of kScale, as the layout orders group or (G = 1) channel scales
    const void* bias;    // [N] of `bias_kind`, or null
    void* out;           // [M, N] of kOut
    float* workspace;    // [kSplit, M, N]: sums of split blocks that are no cluster, else null
    int m, n, k;
    int bias_kind, token_tiles;  // enum Kind; tiles along M
};

// Weights: Marlin or Marlin24 (weights_marlin.cuh). kKind, kScale, kOut: enum Kind of the tokens,
// the scales and Y. kGroup: input channels that share a scale (32, 64, 128); 0 if each output
// channel has one. kTokens: tokens of a warp. kStages: of each team's ring. kHopper: bulk copies
// fill the rings instead of cp.async, and the split blocks are a cluster.
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

    // kSteps: of 128 inputs. kPairs: of a step. kRows, kMetadataRows: rows of tiles of codes and of
    // metadata in a step.
    static constexpr int kStep = 64, kSteps = 128 / kStep, kPairs = kStep / 32;
    static constexpr int kRows = kStep / Weights::kInputs, kMetadataRows = Weights::kSparse ? kRows : 0;
    static constexpr int kScaleBytes = kScale == kFloat32 ? 4 : 2;
    // kGroups: the groups whose scales a stage holds. kGroupSteps: the steps of a group, of which
    // the last brings the scales. kGroupPairs: the pairs whose products are added up before they
    // are scaled and added to the total; without groups these are 128 inputs. kUnrolled: the steps
    // that they span.
    static constexpr int kGroups = kGroup ? (kStep > kGroup ? kStep / kGroup : 1) : 0;
    static constexpr int kGroupSteps = kGroup > kStep ? kGroup / kStep : 1;
    static constexpr int kGroupPairs = kGroup ? kGroup / 32 : 4;
    static constexpr int kUnrolled = kGroupPairs > kPairs ? kGroupPairs / kPairs : 1;

    // A team's ring: kStages times tokens [kTileTokens][64] (128 bytes each, swizzled), then codes
    // [kRows][kColumnWarps] tiles; then kStages times metadata [kMetadataRows][kColumnWarps] tiles
    // and scales [kGroups][kColumns].
    static constexpr int kTokenBytes = kStep * 2, kCodeBytes = kRows * 512 * kColumnWarps;
    static constexpr int kMetadataBytes = kMetadataRows * 256 * kColumnWarps, kGroupBytes = kColumns * kScaleBytes;
    static constexpr int kCodesAt = kTileTokens * kTokenBytes, kStageBytes = kCodesAt + kCodeBytes;
    static constexpr int kSideAt = kStages * kStageBytes, kSideBytes = kMetadataBytes + kGroups * kGroupBytes;
    static constexpr int kRingBytes = (kSideAt + kStages * kSideBytes + 1023) / 1024 * 1024;
    static_assert(kStageBytes % 1024 == 0, "a swizzled token lies at a multiple of 8 of them");

    // After the main loop the teams' sums lie where the rings were: [kTeams][kTileTokens][kStride]
    // floats. The 4 floats beyond a token's columns spread the banks.
    static constexpr int kStride = kColumns + 4;
    static constexpr int kSumsBytes = kTileTokens * kStride * 4;
    static_assert(kStages >= 2, "one stage is filled while another is read");
    // Each block of a cluster adds up and stores an equal share of the tile, counted in float4:
    // four columns of a token. At kReceivedAt lie the sums that the others send of this block's
    // share, [kSplit - 1][kShare] float4; at kBarriersAt the mbarrier that counts them, then those
    // of the stages, [kTeams][kStages].
    static constexpr int kFours = kColumns / 4, kShare = (kTileTokens * kFours + kSplit - 1) / kSplit;
    static constexpr int kReceivedAt = kTeams * (kRingBytes > kSumsBytes ? kRingBytes : kSumsBytes);
    static constexpr int kBarriersAt = kReceivedAt + (kHopper ? (kSplit - 1) * kShare * 16 : 0);
    static_assert(kBarriersAt + (kHopper ? 8 * (kTeams * kStages + 1) : 0) <= SHARED_BYTES, "too little shared memory reserved");
};
