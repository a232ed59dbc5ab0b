// The s4 weight operand under s8 tokens, whole channels or groups: TMA copies of apex4 or
// w4ax-interleaved codes.
//
// There is no s4 wgmma. COMET's zero extension (section 4.3) makes s8 of packed s4, 16 times too
// large:
//     (w << 4) & 0xF0F0F0F0    the four low nibbles        w & 0xF0F0F0F0    the four high ones
// three operations for eight codes; 1 / 16 goes into the weight's scale, exactly. Both layouts keep
// 32 inputs of a row in 16 bytes, of which a thread takes one word: low nibbles go to the first 16
// positions of a k32 instruction, high ones to the last. The tokens' codes come in that order
// (qtool/kernels/activation/quantize_activation_groups.py).
//
// A group's int32 sums become floats inside the main loop:
//     total += float(sum) * sx[m, group] * sw[n, group]
// Tokens of 4 and of 8 bits are the same bytes to the tensor core: a mixed-precision layer has no
// slow blocks.
//
// That is three instructions a sum, and each takes a clock from wgmma, which moves its sums through
// the same register file: measured, the times add up however the two warpgroups take turns. Hence
// the plain order, one set of int32 sums.
#pragma once
#include "hopper/epilogue.cuh"
#include "common/operands.cuh"
#include "hopper/ring.cuh"

// kGroup: 0 is the whole channel. kScale: the kind of the group scales.
template <int kLayout, int kGroup, int kScale, int kTokens>
struct WeightsS4 {
    static constexpr int kInputs = 128, kTokenBytes = 128;  // of a step; of a token there
    static constexpr bool kZero = false, kGrouped = kGroup > 0, kReadsAhead = false, kTokenScales = true;
    using Sum = typename SumOf<kGrouped>::Type;
    // A stage is the codes of two halves of 64 rows, kHalf bytes each, then the scales of each
    // half, [groups][64 rows] kScalePitch bytes apart, then those of the tokens, [groups][tokens]
    // floats.
    static constexpr int kHalf = 64 * 64;
    static constexpr int kGroups = !kGrouped ? 0 : kGroup < 128 ? 128 / kGroup : 1;
    static constexpr int kTokenGroups = kGroups;
    static constexpr int kScaleBytes = kScale == kFloat32 ? 4 : 2, kScalePitch = 64 * 4;
    static constexpr int kScalesAt = 2 * kHalf, kTokenScalesAt = kScalesAt + 2 * kGroups * kScalePitch;
    static constexpr int kUsed = kTokenScalesAt + kGroups * kTokens * 4;
    // The 64-byte swizzle repeats after 512 bytes.
    static constexpr int kStageBytes = (kUsed + 511) / 512 * 512;

    static __device__ __forceinline__ int channel(int n) { return n; }  // where its scale lies

    // The number of the `j`-th group of a step; beyond the last group the codes are zeros, and any
    // finite scale will do.
    static __device__ __forceinline__ int group_of(const Params& p, int step, int j) {
        const int group = kGroup < 128 ? step * kGroups + j : step / (kGroup / 128);
        return min(group, p.k / kGroup - 1);
    }

    // The copies of 64 rows, stage after stage, by one warp. Rows beyond the weight arrive as
    // zeros.
    struct Source {
        const Params& p;
        int row, step;

        __device__ __forceinline__ Source(const Params& p, int row, int step) : p(p), row(row), step(step) {}
        __device__ __forceinline__ void load(u32 stage, int half, u32 bar) {
            if (elect_one()) {
                const u32 scales = row < p.n ? 64 * kScaleBytes : 0;
                mbar_expect(bar, kHalf + kGroups * scales);
                const int x = kLayout == kApex4 ? 4 * row : 64 * step, y = kLayout == kApex4 ? 4 * step : row;
                tensor_copy(stage + half * kHalf, &p.weights, x, y, bar);
                if constexpr (kGrouped) {
                    const u8* all = static_cast<const u8*>(p.scale1);
#pragma unroll
                    for (int j = 0; j < kGroups; ++j) {
                        const u64 first = static_cast<u64>(group_of(p, step, j)) * p.n + row;
                        if (scales) bulk_copy(stage + kScalesAt + (half * kGroups + j) * kScalePitch, all + first * kScaleBytes, scales, bar);
                    }
                }
            }
            ++step;
        }
    };

    // The scales of a tile's tokens, [G, M rounded up to 4]: bytes of a stage, and their copies by
    // one thread.
    static __device__ __forceinline__ int padded(int m) { return (m + 3) / 4 * 4; }
    static __device__ __forceinline__ u32 token_scale_bytes(const Params& p, int m) { return 4 * min(kTokens, padded(p.m) - m); }
    static __device__ __forceinline__ void load_token_scales(const Params& p, u32 stage, int step, int m, u32 bar) {
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            const u64 first = static_cast<u64>(group_of(p, step, j)) * padded(p.m) + m;
            bulk_copy(stage + kTokenScalesAt + j * kTokens * 4, p.token_scale + first, token_scale_bytes(p, m), bar);
        }
    }

    // Registers of the four k32 instructions of a stage, for thread `t` of warpgroup `wg`; row q,
    // then q + 8.
    static __device__ __forceinline__ void fragments(u32 (&a)[16], const u8* stage, int wg, int t) {
        const int row = t / 32 * 16 + t % 32 / 4;
        const u8* codes = stage + wg * kHalf + t % 4 * 4;
        u32 words[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int at = kLayout == kApex4 ? i / 2 * 1024 + (row + i % 2 * 8) * 16
                                             : (row + i % 2 * 8) * 64 + (i / 2 ^ (row / 2 & 3)) * 16;  // swizzled
            words[i] = *reinterpret_cast<const u32*>(codes + at);
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            a[i / 2 * 4 + i % 2] = (words[i] << 4) & 0xF0F0F0F0u;
            a[i / 2 * 4 + i % 2 + 2] = words[i] & 0xF0F0F0F0u;
        }
    }

    // total += sums * sx * sw for the `j`-th group of a stage.
    static __device__ __forceinline__ void promote(float (&total)[kTokens / 2], int (&sums)[kTokens / 2], const u8* stage,
                                                   int j, int wg, int t) {
        const u8* scales = stage + kScalesAt + (wg * kGroups + j) * kScalePitch;
        const float* tokens = reinterpret_cast<const float*>(stage + kTokenScalesAt) + j * kTokens + t % 4 * 2;
        float sw[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) sw[h] = 0.0625f * load_as_float(scales, t / 32 * 16 + t % 32 / 4 + 8 * h, kScale);
        settle(sums);
#pragma unroll
        for (int i = 0; i < kTokens / 8; ++i) {
            const float2 sx = *reinterpret_cast<const float2*>(tokens + 8 * i);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                float* to = total + 4 * i + 2 * h;
                const int* from = sums + 4 * i + 2 * h;
                to[0] = fmaf(static_cast<float>(from[0]) * sx.x, sw[h], to[0]);
                to[1] = fmaf(static_cast<float>(from[1]) * sx.y, sw[h], to[1]);
            }
        }
    }

    // One stage: unpack it while the instructions before are under way, promote their sums, put
    // this one in flight.
    template <class Pipe>
    static __device__ __forceinline__ void batch(float (&total)[kTokens / 2], int (&sums)[kTokens / 2], Pipe& pipe,
                                                 u32 (&a)[16], u32 (&in_flight)[16], int wg, int t) {
        constexpr int kInstructions = 4 / kGroups;  // of a group
        pipe.wait_full();
        const u8* stage = pipe.stage();
        fragments(a, stage, wg, t);
        finish(total, sums, pipe, in_flight, wg, t);
        keep(a);  // unpacked before the first instruction reads them
        const u64 tokens = pipe.tokens();
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
            wgmma_fence();
#pragma unroll
            for (int i = j * kInstructions; i < (j + 1) * kInstructions; ++i) {
                if (i == j * kInstructions) Wgmma<kTokens>::rs_s8_first(sums, a + 4 * i, tokens + 2 * i);
                else Wgmma<kTokens>::rs_s8(sums, a + 4 * i, tokens + 2 * i);
            }
            wgmma_commit();
            if (j < kGroups - 1) {
                wgmma_wait<0>();
                promote(total, sums, stage, j, wg, t);
            }
        }
        pipe.advance();
    }

    // Promotes the last group of the stage before, if there is one, and gives the stage back.
    template <class Pipe>
    static __device__ __forceinline__ void finish(float (&total)[kTokens / 2], int (&sums)[kTokens / 2], Pipe& pipe,
                                                  const u32 (&in_flight)[16], int wg, int t) {
        wgmma_wait<0>();
        keep(in_flight);
        if (pipe.previous < 0) return;
        promote(total, sums, pipe.previous_stage(), kGroups - 1, wg, t);
        pipe.release_previous();
    }

    // The main loop over `steps` stages of 128 columns; the totals of groups, in their order, or a
    // channel's exact sums.
    template <int kPanels, int, class Pipe>
    static __device__ __forceinline__ void multiply(Sum (&totals)[kPanels][kTokens / 2], Pipe& pipe, int steps, int wg, int t) {
        u32 even[16], odd[16];
        if constexpr (kGrouped) {
            static_assert(kPanels == 1, "no registers");
            int sums[kTokens / 2] = {};
            for (int i = 0; i + 1 < steps; i += 2) {
                batch(totals[0], sums, pipe, even, odd, wg, t);
                batch(totals[0], sums, pipe, odd, even, wg, t);
            }
            if (steps % 2) batch(totals[0], sums, pipe, even, odd, wg, t);
            finish(totals[0], sums, pipe, even, wg, t);
            keep(odd);
        } else {
            if constexpr (kPanels == 2) {
                for (int i = 0; i < steps; ++i) {
                    exact_batch<0, false>(totals[0], pipe, even, odd, wg, t);
                    exact_batch<1, true>(totals[1], pipe, odd, even, wg, t);
                }
            } else {
                for (int i = 0; i + 1 < steps; i += 2) {
                    exact_batch<0, true>(totals[0], pipe, even, odd, wg, t);
                    exact_batch<0, true>(totals[0], pipe, odd, even, wg, t);
                }
                if (steps % 2) exact_batch<0, true>(totals[0], pipe, even, odd, wg, t);
            }
            wgmma_wait<0>();
            keep(even);
            keep(odd);
            pipe.release_previous();
#pragma unroll
            for (int panel = 0; panel < kPanels; ++panel) {
                settle(totals[panel]);
#pragma unroll
                for (int i = 0; i < kTokens / 2; ++i) totals[panel][i] >>= 4;
            }
        }
    }

    // A panel of one stage of a whole channel: two of them are under way at a time.
    template <int kPanel, bool kLast, class Pipe>
    static __device__ __forceinline__ void exact_batch(int (&sums)[kTokens / 2], Pipe& pipe, u32 (&a)[16],
                                                       const u32 (&in_flight)[16], int wg, int t) {
        if constexpr (kPanel == 0) pipe.wait_full();
        fragments(a, pipe.stage() + kPanel * kStageBytes, wg, t);
        const u64 tokens = pipe.tokens();
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) Wgmma<kTokens>::rs_s8(sums, a + 4 * i, tokens + 2 * i);
        wgmma_commit();
        wgmma_wait<1>();
        keep(in_flight);
        if constexpr (kPanel == 0) pipe.release_previous();
        if constexpr (kLast) pipe.advance();
    }
};
