// The 4-bit weight operand under 16-bit tokens: TMA copies of marlin tiles, and their codes as 16-bit registers.
//
// MARLIN's tile is 16 inputs by 64 outputs, 512 bytes; word j of a lane's 16 bytes is its A fragment of outputs
// 16 j + lane / 4, + 8. wgmma's 64 rows are four such fragments, one a warp: warp w takes word w. The four lanes that then
// share a bank cost what the 16-byte load of all four words would.
//
// code - 8 is exact in 16 bits. A group's scale comes in by one of two ways:
//   kRounds    each weight is multiplied by it and rounded to 16 bits, as MARLIN and every dequantized checkpoint do.
//   kPromotes  the exact products of a group are summed, and total += sum * scale in float32: a multiplication a sum instead
//              of one a weight, which is less where tokens are few. Also where scales have another dtype than tokens.
// The scale of a whole channel is the epilogue's; few tokens promote its sums every 128 inputs all the same, for tensor cores
// truncate what they add.
#pragma once
#include "common/half_codes.cuh"
#include "hopper/params.cuh"
#include "hopper/ring.cuh"

// kGroup: 0 is the whole channel. kScale, kKind: of the group scales and of the tokens. kStep: input channels of a stage, 64 or 128.
template <int kGroup, int kScale, int kKind, int kTokens, int kStep>
struct WeightsMarlin {
    using Sum = float;
    static constexpr int kInputs = kStep, kTokenBytes = 2 * kStep, kTokenGroups = 0;  // of a step; of a token there, and its scales
    static constexpr bool kZero = false, kGrouped = kGroup > 0, kReadsAhead = false, kTokenScales = false;
    static constexpr bool kPromotes = kTokens <= EXACT_TOKENS || (kGrouped && kScale != kKind), kRounds = kGrouped && !kPromotes;
    static constexpr int kSummed = kGrouped ? kGroup : 128, kEach = kSummed / 16;        // input channels and instructions of a sum
    static constexpr int kGroups = !kGrouped ? 0 : kGroup < kStep ? kStep / kGroup : 1;  // whose scales a stage holds
    static constexpr int kInstructions = kStep / 16;                                     // of a stage and panel
    static constexpr int kBatch = 4, kParts = kInstructions / kBatch;                    // whose registers are filled at a time
    static constexpr int kHalf = kInstructions * 512;                                    // bytes of 64 rows in a stage
    static constexpr int kScaleBytes = 64 * (kScale == kFloat32 ? 4 : 2);                // of a group of 64 rows
    static constexpr int kScalesAt = 2 * kHalf, kStageBytes = kScalesAt + 2 * kGroups * kScaleBytes;

    // Where the scale of the whole channel n lies: the order of MARLIN's accumulators.
    static __device__ __forceinline__ int channel(int n) {
        return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 16 * 4 + n % 16 / 8 * 2 + n % 2;
    }

    // The copies of 64 rows, stage after stage, by one warp. Rows beyond the weight arrive as zeros, their scales not at all.
    struct Source {
        const Params& p;
        bool valid;
        int column, inputs;  // within the rows' matrix; from the first matrix on, in 16

        __device__ __forceinline__ Source(const Params& p, int row, int step)
            : p(p), valid(row < p.n), column(row % p.part), inputs(row / p.part * (p.k / 16) + step * kInstructions) {}
        __device__ __forceinline__ void load(u32 stage, int half, u32 bar) {
            if (elect_one()) {
                mbar_expect(bar, kHalf + (valid ? kGroups * kScaleBytes : 0));
                tensor_copy_once(stage + half * kHalf, &p.weights, 2 * column, inputs, bar);
#pragma unroll
                for (int j = 0; j < kGroups; ++j) {
                    const u64 first = static_cast<u64>(inputs * 16 / kSummed + j) * p.part + column;
                    const u32 at = stage + kScalesAt + (half * kGroups + j) * kScaleBytes;
                    if (valid) bulk_copy_once(at, static_cast<const u8*>(p.scale1) + first * (kScaleBytes / 64), kScaleBytes, bar);
                }
            }
            inputs += kInstructions;
        }
    };

    // Of this thread's rows q and q + 8 in group `j` of a stage.
    static __device__ __forceinline__ const u8* scales(const u8* stage, int j, int wg, int t) {
        return stage + kScalesAt + (wg * kGroups + j) * kScaleBytes + (t % 32 / 4 * 8 + t / 32 * 2) * (kScaleBytes / 64);
    }

    // Registers of the instructions [first, first + kBatch) of a stage, for thread `t` of warpgroup `wg`.
    static __device__ __forceinline__ void fragments(u32 (&a)[4 * kBatch], const u8* stage, int first, int wg, int t) {
        const u8* codes = stage + wg * kHalf + first * 512 + t % 32 * 16 + t / 32 * 4;
        u32 words[kBatch], scale[2];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) words[i] = *reinterpret_cast<const u32*>(codes + i * 512);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            u32 r[4];
            dequantize<kKind>(words[i], r);
            if constexpr (kRounds) {
                if (i % kEach == 0) {
                    const u32 both = *reinterpret_cast<const u32*>(scales(stage, (first + i) / kEach, wg, t));
                    scale[0] = __byte_perm(both, 0, 0x1010), scale[1] = __byte_perm(both, 0, 0x3232);
                }
#pragma unroll
                for (int j = 0; j < 4; ++j) r[j] = multiply_pair<kKind>(r[j], scale[j % 2]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) a[4 * i + j] = r[j];
        }
    }

    // One instruction; `first` overwrites the sums.
    static __device__ __forceinline__ void multiply_add(float (&sums)[kTokens / 2], const u32* a, u64 tokens, int i, bool first) {
        using W = Wgmma<kTokens>;
        const u64 operand = tokens + i / 4 * (kTokens * 8) + i % 4 * 2;
        if constexpr (kKind == kBfloat16) first ? W::rs_bf16_first(sums, a, operand) : W::rs_bf16(sums, a, operand);
        else first ? W::rs_f16_first(sums, a, operand) : W::rs_f16(sums, a, operand);
    }

    // A part of a stage: dequantize while the part before is multiplied, put this one in flight, wait for that one.
    template <int kPart, class Pipe>
    static __device__ __forceinline__ void batch(float (&sums)[kTokens / 2], Pipe& pipe, u32 (&a)[4 * kBatch], const u32 (&in_flight)[4 * kBatch],
                                                 int wg, int t) {
        if constexpr (kPart == 0) pipe.wait_full();
        fragments(a, pipe.stage(), kPart * kBatch, wg, t);
        keep(a);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) multiply_add(sums, a + 4 * i, pipe.tokens(), kPart * kBatch + i, false);
        wgmma_commit();
        wgmma_wait<1>();
        keep(in_flight);
        if constexpr (kPart == 0) pipe.release_previous();
        if constexpr (kPart == kParts - 1) pipe.advance();
    }

    // total += sum * scale for group `j` of a stage, or the stage.
    static __device__ __forceinline__ void promote(float (&total)[kTokens / 2], float (&sums)[kTokens / 2], const u8* stage, int j, int wg,
                                                   int t) {
        float scale[2] = {1.f, 1.f};
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if constexpr (kGrouped) scale[h] = load_as_float(scales(stage, j, wg, t), h, kScale);
        settle(sums);
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) total[i] = fmaf(sums[i], scale[i % 4 / 2], total[i]);
    }

    // A part of a stage where sums are promoted, each group's before the next one starts.
    template <int kPart, class Pipe>
    static __device__ __forceinline__ void exact_batch(float (&total)[kTokens / 2], float (&sums)[kTokens / 2], Pipe& pipe, u32 (&a)[4 * kBatch],
                                                       const u32 (&in_flight)[4 * kBatch], int wg, int t) {
        if constexpr (kPart == 0) pipe.wait_full();
        const u8* stage = pipe.stage();
        fragments(a, stage, kPart * kBatch, wg, t);
        keep(a);
        if constexpr (kPart == 0) finish(total, sums, pipe, in_flight, wg, t);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int instruction = kPart * kBatch + i;
            if (instruction > 0 && instruction % kEach == 0) {
                wgmma_commit();
                wgmma_wait<0>();
                promote(total, sums, stage, instruction / kEach - 1, wg, t);
                wgmma_fence();
            }
            multiply_add(sums, a + 4 * i, pipe.tokens(), instruction, instruction % kEach == 0);
        }
        wgmma_commit();
        if constexpr (kPart > 0) {
            wgmma_wait<1>();
            keep(in_flight);
        }
        if constexpr (kPart == kParts - 1) pipe.advance();
    }

    // Promotes the last group of the stage before, if there is one, and gives the stage back.
    template <class Pipe>
    static __device__ __forceinline__ void finish(float (&total)[kTokens / 2], float (&sums)[kTokens / 2], Pipe& pipe,
                                                  const u32 (&in_flight)[4 * kBatch], int wg, int t) {
        wgmma_wait<0>();
        keep(in_flight);
        if (pipe.previous < 0) return;
        promote(total, sums, pipe.previous_stage(), kGroups - 1, wg, t);
        pipe.release_previous();
    }

    // The main loop over `steps` stages.
    template <int kPanels, int, class Pipe>
    static __device__ __forceinline__ void multiply(float (&totals)[kPanels][kTokens / 2], Pipe& pipe, int steps, int wg, int t) {
        static_assert(kPanels == 1, "the host has no such tiles");
        u32 even[4 * kBatch], odd[4 * kBatch];
        if constexpr (kPromotes) {
            static_assert(kParts == 2, "a stage has whole groups");
            float sums[kTokens / 2] = {};
            for (int i = 0; i < steps; ++i) {
                exact_batch<0>(totals[0], sums, pipe, even, odd, wg, t);
                exact_batch<1>(totals[0], sums, pipe, odd, even, wg, t);
            }
            finish(totals[0], sums, pipe, odd, wg, t);
            keep(even);
            return;
        }
        if constexpr (kParts == 2) {
            for (int i = 0; i < steps; ++i) {
                batch<0>(totals[0], pipe, even, odd, wg, t);
                batch<1>(totals[0], pipe, odd, even, wg, t);
            }
        } else {
            for (int i = 0; i + 1 < steps; i += 2) {
                batch<0>(totals[0], pipe, even, odd, wg, t);
                batch<0>(totals[0], pipe, odd, even, wg, t);
            }
            if (steps % 2) batch<0>(totals[0], pipe, even, odd, wg, t);
        }
        wgmma_wait<0>();
        keep(even);
        keep(odd);
        pipe.release_previous();
        settle(totals[0]);
    }
};
