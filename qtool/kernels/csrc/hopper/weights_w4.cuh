// The 4-bit weight operand: bulk copies of dual-MMA tiles, and their dequantization to s8
// registers.
//
// The three schemes differ in one line. With s and c constant over a group, four packed codes
// become
//     codes * s + c * 0x01010101            one IMAD
// LiquidQuant stores c = 128 + lo (LiquidGEMM eq. 12). QoQ's (q - z) * s is the same expression
// with c = 128 - z * s: its invariant -128 <= (q - z) * s <= 127 says that every byte of the sum
// lies in 0..255, so the 32-bit sum has no carry between bytes although c itself may be negative.
// Per channel the codes are multiplied as they are.
//
// Every byte is 128 too large. The paper removes this by XOR 0x80808080; here the bytes stay
// unsigned (wgmma multiplies u8 by s8) and the epilogue subtracts 128 times the sum of the token's
// codes, exactly. That is a third of the dequantization's instructions on the busiest pipe.
#pragma once
#include "hopper/ring.cuh"
#include "hopper/params.cuh"
#include "common/operands.cuh"

// kScheme: enum Scheme. kGroup: input channels that share level-2 parameters.
template <int kScheme, int kGroup>
struct Weights4 {
    using Sum = int;
    // The members that Gemm expects (gemm.cuh).
    static constexpr int kInputs = 128, kTokenBytes = 128, kTokenGroups = 0;
    static constexpr bool kGrouped = false;  // the sums of a tile are exact integers
    static constexpr bool kZero = true, kReadsAhead = true, kTokenScales = true;
    static constexpr bool kTwoLevels = kScheme != kQoqChannel;
    // A stage is kCodes bytes of tiles: for each half of 64 rows two of kTile bytes, 64 rows x 64
    // columns each (the layout dual-mma). Then the scales of level 2, [half][group][64 rows],
    // kLevel2 bytes, and the offsets in the same order.
    static constexpr int kTile = 2048;
    static constexpr int kCodes = 4 * kTile;
    static constexpr int kGroups = kTwoLevels ? 128 / kGroup : 0;
    static constexpr int kLevel2 = 2 * kGroups * 64;
    static constexpr int kStageBytes = kCodes + 2 * kLevel2;

    static __device__ __forceinline__ int channel(int n) { return n; }  // where its scale lies

    // The copies of 64 rows, stage after stage, by one warp. `row` may lie beyond the weight: then
    // nothing is copied.
    struct Source {
        const u8 *codes, *scale2, *offset2;
        int left;  // column tiles not yet copied

        __device__ __forceinline__ Source(const Params& p, int row, int step) {
            const int tiles = p.k / 64;
            codes = p.qweight + (static_cast<u64>(row / 64) * tiles + 2 * step) * kTile;
            if constexpr (kTwoLevels) {
                const u64 first = (static_cast<u64>(row / 64) * (p.k / kGroup) + step * kGroups) * 64;
                scale2 = p.scale2 + first, offset2 = p.offset2 + first;
            }
            left = row < p.n ? tiles - 2 * step : 0;
        }
        __device__ __forceinline__ void load(u32 stage, int half, u32 bar) {
            const int here = max(min(2, left), 0);
            if (elect_one()) {
                const u32 level2 = kTwoLevels ? here * 64 * 64 / kGroup : 0;
                mbar_expect(bar, here * kTile + 2 * level2);
                if (here) {
                    bulk_copy_once(stage + half * 2 * kTile, codes, here * kTile, bar);
                    if constexpr (kTwoLevels) {
                        const u32 at = stage + kCodes + half * kGroups * 64;
                        bulk_copy_once(at, scale2, level2, bar);
                        bulk_copy_once(at + kLevel2, offset2, level2, bar);
                    }
                }
            }
            codes += 2 * kTile, left -= 2;
            if constexpr (kTwoLevels) scale2 += kGroups * 64, offset2 += kGroups * 64;
        }
        // Brings into L2 the stage that load() will copy `ahead` stages later.
        __device__ __forceinline__ void prefetch(int ahead) const {
            if (left < 2 * (ahead + 1) || !elect_one()) return;
            bulk_prefetch_l2(codes + ahead * 2 * kTile, 2 * kTile);
            if constexpr (kTwoLevels) {
                bulk_prefetch_l2(scale2 + ahead * kGroups * 64, kGroups * 64);
                bulk_prefetch_l2(offset2 + ahead * kGroups * 64, kGroups * 64);
            }
        }
    };

    // Scale and constant of this thread's two rows over 32 columns.
    struct Level2 {
        u32 s[2], c[2];
        __device__ __forceinline__ void read(const u8* scale, const u8* offset) {
            const u32 s2 = *reinterpret_cast<const u16*>(scale), o2 = *reinterpret_cast<const u16*>(offset);
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                s[h] = __byte_perm(s2, 0, 0x4440 + h);
                if constexpr (kScheme == kLqq) c[h] = __byte_perm(o2, 0, 0x1111 * h);
                else c[h] = (128 - __byte_perm(o2, 0, 0x4440 + h) * s[h]) * 0x01010101u;
            }
        }
        __device__ __forceinline__ u32 apply(u32 codes, int h) const { return codes * s[h] + c[h]; }
    };

    // Registers of the two k32 instructions of column tile `half` of a stage, for thread `t` of
    // warpgroup `wg`.
    static __device__ __forceinline__ void fragment(u32* a, const uint4& packed, const u8* stage, int wg, int half, int t) {
        const u32 words[4] = {packed.x, packed.y, packed.z, packed.w};
        Level2 low, high;
        if constexpr (kTwoLevels) {
            const int first = kGroup == 128 ? 0 : half * (64 / min(kGroup, 64));
            const u8* at = stage + kCodes + (wg * kGroups + first) * 64 + t / 4 * 2;  // 16 w + 2 q
            low.read(at, at + kLevel2);
            if constexpr (kGroup == 32) high.read(at + 64, at + 64 + kLevel2);
            else high = low;
        }
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            const u32 first = words[r] & 0x0F0F0F0Fu, second = (words[r] >> 4) & 0x0F0F0F0Fu;
            a[r] = kTwoLevels ? low.apply(first, r % 2) : first;
            a[4 + r] = kTwoLevels ? high.apply(second, r % 2) : second;
        }
    }

    // Column tiles [kBegin, kEnd) of a panel of a stage: dequantize while the batch before is
    // multiplied, put this one in flight, wait for that one.
    template <int kPanel, int kBegin, int kEnd, bool kLast, int kTokens, class Pipe>
    static __device__ __forceinline__ void batch(int (&acc)[kTokens / 2], Pipe& pipe, u32 (&a)[8 * (kEnd - kBegin)],
                                                 u32 (&in_flight)[8 * (kEnd - kBegin)], int wg, int t) {
        constexpr bool kFirst = kPanel == 0 && kBegin == 0;
        if constexpr (kFirst) pipe.wait_full();
        const u8* stage = pipe.stage() + kPanel * kStageBytes;
        const uint4* packed = reinterpret_cast<const uint4*>(stage + wg * 2 * kTile) + t;
        uint4 codes[kEnd - kBegin];
#pragma unroll
        for (int i = kBegin; i < kEnd; ++i) codes[i - kBegin] = packed[i * kTile / 16];
#pragma unroll
        for (int i = kBegin; i < kEnd; ++i) fragment(a + 8 * (i - kBegin), codes[i - kBegin], stage, wg, i, t);
        const u64 tokens = pipe.tokens();
        wgmma_fence();
#pragma unroll
        for (int i = 2 * kBegin; i < 2 * kEnd; ++i) Wgmma<kTokens>::rs(acc, a + 4 * (i - 2 * kBegin), tokens + 2 * i);
        wgmma_commit();
        wgmma_wait<1>();
        keep(in_flight);
        if constexpr (kFirst) pipe.release_previous();
        if constexpr (kLast) pipe.advance();
    }

    // The main loop over `steps` stages of 128 columns; `pipe` says which shared-memory slot holds
    // each. A batch is a panel of a stage if registers allow, which gives twice the independent
    // instructions to hide latency.
    template <int kPanels, int kTokens, class Pipe>
    static __device__ __forceinline__ void multiply(int (&acc)[kPanels][kTokens / 2], Pipe& pipe, int steps, int wg, int t) {
        constexpr bool kHalves = kTokens >= 64 && BLOCKS_PER_SM == 2;
        static_assert(!kHalves || kPanels == 1, "no registers");
        u32 even[kHalves ? 8 : 16], odd[kHalves ? 8 : 16];
        if constexpr (kHalves) {
            for (int i = 0; i < steps; ++i) {
                batch<0, 0, 1, false, kTokens>(acc[0], pipe, even, odd, wg, t);
                batch<0, 1, 2, true, kTokens>(acc[0], pipe, odd, even, wg, t);
            }
        } else if constexpr (kPanels == 2) {
            for (int i = 0; i < steps; ++i) {
                batch<0, 0, 2, false, kTokens>(acc[0], pipe, even, odd, wg, t);
                batch<1, 0, 2, true, kTokens>(acc[1], pipe, odd, even, wg, t);
            }
        } else {
            for (int i = 0; i + 1 < steps; i += 2) {
                batch<0, 0, 2, true, kTokens>(acc[0], pipe, even, odd, wg, t);
                batch<0, 0, 2, true, kTokens>(acc[0], pipe, odd, even, wg, t);
            }
            if (steps % 2) batch<0, 0, 2, true, kTokens>(acc[0], pipe, even, odd, wg, t);
        }
        wgmma_wait<0>();
        keep(even);
        keep(odd);
        pipe.release_previous();
    }
};
