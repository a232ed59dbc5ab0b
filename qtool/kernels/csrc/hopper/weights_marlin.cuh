// The 4-bit weight operand under 16-bit tokens: TMA copies of marlin or marlin-24 tiles, and their
// codes as 16-bit registers.
//
// code - 8 is exact in 16 bits. A group's scale comes in by one of two ways:
//   kRounds    each weight is multiplied by it and rounded to 16 bits, as MARLIN and every
//              dequantized checkpoint do.
//   kPromotes  the exact products of a group are summed, and total += sum * scale in float32: one
//              multiplication per sum instead of one per weight, which is less if tokens are few.
//              This is also used if scales and tokens differ in dtype.
// The epilogue applies the scale of a whole channel. With few tokens its sums are promoted every
// 128 inputs all the same, since tensor cores truncate in their sums.
#pragma once
#include "hopper/fragments_marlin.cuh"
#include "hopper/params.cuh"
#include "hopper/ring.cuh"

// Layout: Marlin or Marlin24. kGroup: 0 is the whole channel. kScale, kKind: of the group scales
// and of the tokens. kStep: input channels of a stage, 64 or 128.
template <class Layout, int kGroup, int kScale, int kKind, int kTokens, int kStep>
struct WeightsMarlin {
    using Sum = float;
    // The members that Gemm expects (gemm.cuh).
    static constexpr int kInputs = kStep, kTokenBytes = 2 * kStep, kTokenGroups = 0;
    static constexpr bool kZero = false, kGrouped = kGroup > 0, kReadsAhead = false, kTokenScales = false;
    static constexpr bool kPromotes = kTokens <= EXACT_TOKENS || (kGrouped && kScale != kKind), kRounds = kGrouped && !kPromotes;
    // A stage has kParts parts of 64 input channels, a part kBatch instructions, whose fragments
    // are kRegisters registers. kEach instructions (kSummed input channels) are summed before they
    // are promoted. kGroups: the groups whose scales a stage holds.
    static constexpr int kParts = kStep / 64, kBatch = 64 / Layout::kInputs;
    static constexpr int kInstructions = kParts * kBatch, kRegisters = Layout::kPair * kBatch / 2;
    static constexpr int kSummed = kGrouped ? kGroup : 128;
    static constexpr int kEach = kSummed / Layout::kInputs;
    static constexpr int kGroups = !kGrouped ? 0 : kGroup < kStep ? kStep / kGroup : 1;
    // Bytes of 64 rows in a stage: codes, positions, and the scales of one group. A stage is the
    // codes of both halves, then their positions, then their scales.
    static constexpr int kHalf = kInstructions * 512;
    static constexpr int kPositionBytes = kInstructions * Layout::kPositionBytes;
    static constexpr int kScaleBytes = 64 * (kScale == kFloat32 ? 4 : 2);
    static constexpr int kPositionsAt = 2 * kHalf, kScalesAt = kPositionsAt + 2 * kPositionBytes;
    static constexpr int kStageBytes = kScalesAt + 2 * kGroups * kScaleBytes;

    // The place of the scale of the whole channel n.
    static __device__ __forceinline__ int channel(int n) { return Layout::channel(n); }

    // The copies of 64 rows, stage after stage, by one warp. Rows beyond the weight arrive as
    // zeros, their scales not at all.
    struct Source {
        const Params& p;
        bool valid;
        int column, line;  // within the rows' matrix; from the first matrix on

        __device__ __forceinline__ Source(const Params& p, int row, int step)
            : p(p), valid(row < p.n), column(row % p.part), line(row / p.part * (p.k / Layout::kInputs) + step * kInstructions) {}
        __device__ __forceinline__ void load(u32 stage, int half, u32 bar) {
            if (elect_one()) {
                mbar_expect(bar, kHalf + kPositionBytes + (valid ? kGroups * kScaleBytes : 0));
                tensor_copy_once(stage + half * kHalf, &p.weights, 2 * column, line, bar);
                if constexpr (kPositionBytes > 0)
                    tensor_copy_once(stage + kPositionsAt + half * kPositionBytes, &p.positions, 4 * column, line, bar);
#pragma unroll
                for (int j = 0; j < kGroups; ++j) {
                    const u64 first = static_cast<u64>(line / kEach + j) * p.part + column;
                    const u32 at = stage + kScalesAt + (half * kGroups + j) * kScaleBytes;
                    if (valid) bulk_copy_once(at, static_cast<const u8*>(p.scale1) + first * (kScaleBytes / 64), kScaleBytes, bar);
                }
            }
            line += kInstructions;
        }
    };

    // Of this thread's row q in group `j` of a stage; that of row q + 8 is Layout::kNextScale
    // further.
    static __device__ __forceinline__ const u8* scales(const u8* stage, int j, int wg, int t) {
        return stage + kScalesAt + (wg * kGroups + j) * kScaleBytes + Layout::scale(t) * (kScaleBytes / 64);
    }

    // Registers of the instructions [first, first + kBatch) of a stage, for thread `t` of warpgroup
    // `wg`: of each pair its weights, and of a 2:4 sparse one their positions.
    static __device__ __forceinline__ void fragments(u32 (&a)[kRegisters], const u8* stage, int first, int wg, int t) {
        const u8* codes = stage + wg * kHalf + first * 512;
        u32 words[kBatch], scale[2];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) words[i] = Layout::word(codes + i * 512, t);
        if constexpr (kPositionBytes > 0) {
            const u8* positions = stage + kPositionsAt + wg * kPositionBytes + first * Layout::kPositionBytes;
#pragma unroll
            for (int i = 0; i < kBatch; i += 2) a[i / 2 * Layout::kPair + 8] = Layout::positions(positions + i * Layout::kPositionBytes, t);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            u32 r[4];
            dequantize<kKind>(words[i], r);
            if constexpr (kRounds) {
                if (i % kEach == 0) Layout::read_scales(scale, scales(stage, (first + i) / kEach, wg, t));
#pragma unroll
                for (int j = 0; j < 4; ++j) r[j] = multiply_pair<kKind>(r[j], scale[j % 2]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) a[i / 2 * Layout::kPair + i % 2 * 4 + j] = r[j];
        }
    }

    // Instruction `i` of a part; `first` overwrites the sums.
    static __device__ __forceinline__ void multiply_add(float (&sums)[kTokens / 2], const u32 (&a)[kRegisters], u64 tokens, int i, bool first) {
        Layout::multiply_add(sums, a + i / 2 * Layout::kPair, i % 2, tokens + i * (8 / kBatch), first);
    }

    // A part of a stage: dequantize while the part before is multiplied, put this one in flight,
    // wait for that one.
    template <int kPart, class Pipe>
    static __device__ __forceinline__ void batch(float (&sums)[kTokens / 2], Pipe& pipe, u32 (&a)[kRegisters], const u32 (&in_flight)[kRegisters],
                                                 int wg, int t) {
        if constexpr (kPart == 0) pipe.wait_full();
        fragments(a, pipe.stage(), kPart * kBatch, wg, t);
        keep(a);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < kBatch; ++i) multiply_add(sums, a, pipe.tokens() + kPart * (kTokens * 8), i, false);
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
            if constexpr (kGrouped) scale[h] = load_as_float(scales(stage, j, wg, t), h * Layout::kNextScale, kScale);
        settle(sums);
#pragma unroll
        for (int i = 0; i < kTokens / 2; ++i) total[i] = fmaf(sums[i], scale[i % 4 / 2], total[i]);
    }

    // A part of a stage with promoted sums: those of a group are promoted before the next group
    // starts.
    template <int kPart, class Pipe>
    static __device__ __forceinline__ void exact_batch(float (&total)[kTokens / 2], float (&sums)[kTokens / 2], Pipe& pipe, u32 (&a)[kRegisters],
                                                       const u32 (&in_flight)[kRegisters], int wg, int t) {
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
            multiply_add(sums, a, pipe.tokens() + kPart * (kTokens * 8), i, instruction % kEach == 0);
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
                                                  const u32 (&in_flight)[kRegisters], int wg, int t) {
        wgmma_wait<0>();
        keep(in_flight);
        if (pipe.previous < 0) return;
        promote(total, sums, pipe.previous_stage(), kGroups - 1, wg, t);
        pipe.release_previous();
    }

    template <int kPart, class Pipe>
    static __device__ __forceinline__ void part(float (&total)[kTokens / 2], float (&sums)[kTokens / 2], Pipe& pipe, u32 (&a)[kRegisters],
                                                const u32 (&in_flight)[kRegisters], int wg, int t) {
        if constexpr (kPromotes) exact_batch<kPart>(total, sums, pipe, a, in_flight, wg, t);
        else batch<kPart>(total, pipe, a, in_flight, wg, t);
    }

    // The main loop over `steps` stages.
    template <int kPanels, int, class Pipe>
    static __device__ __forceinline__ void multiply(float (&totals)[kPanels][kTokens / 2], Pipe& pipe, int steps, int wg, int t) {
        static_assert(kPanels == 1, "the host has no such tiles");
        static_assert(!kPromotes || kStep == 128, "a stage has whole groups");
        float(&total)[kTokens / 2] = totals[0], sums[kTokens / 2] = {};  // the sums of a group
        u32 even[kRegisters], odd[kRegisters];
        if constexpr (kParts == 2) {
            for (int i = 0; i < steps; ++i) {
                part<0>(total, sums, pipe, even, odd, wg, t);
                part<1>(total, sums, pipe, odd, even, wg, t);
            }
        } else {
            for (int i = 0; i + 1 < steps; i += 2) {
                part<0>(total, sums, pipe, even, odd, wg, t);
                part<0>(total, sums, pipe, odd, even, wg, t);
            }
            if (steps % 2) part<0>(total, sums, pipe, even, odd, wg, t);
        }
        if constexpr (kPromotes) {
            finish(total, sums, pipe, odd, wg, t);
            keep(even);
        } else {
            wgmma_wait<0>();
            keep(even);
            keep(odd);
            pipe.release_previous();
            settle(total);
        }
    }
};
