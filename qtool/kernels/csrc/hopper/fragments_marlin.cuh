// marlin and marlin-24 as wgmma's A operand: the place of a thread's weights in a stage, and the
// instruction that multiplies them.
//
// wgmma's 64 rows are mma's 16 rows for each of four warps: thread t has rows 16 (t / 32) + c
// and + 8 of 64. The operand of a 2:4 sparse wgmma is the kept half in the same place, and a
// register of positions, which two of four lanes hold.
//
// Legend: c = t % 32 / 4, q = t % 4; a *line* holds the weights of 64 rows for one instruction: 512
// bytes of codes.
#pragma once
#include "common/half_codes.cuh"

// MARLIN: word j of a lane's 16 bytes is the fragment of rows 16 j + c, + 8 and of 16 inputs, so
// warp w takes word w. Four lanes then share a bank, which costs as much as the 16-byte load of all
// four words would.
template <int kKind, int kTokens>
struct Marlin {
    // Input channels of an instruction, and the registers of a pair of instructions.
    static constexpr int kInputs = 16, kPair = 8;
    static constexpr int kPositionBytes = 0;       // of a line
    static constexpr int kNextScale = 1;           // from the scale of row c to that of c + 8

    // The place of the scale of the whole channel n, in the order of MARLIN's accumulators.
    static __device__ __forceinline__ int channel(int n) {
        return n / 32 * 32 + n % 8 / 2 * 8 + n % 32 / 16 * 4 + n % 16 / 8 * 2 + n % 2;
    }
    // The place among 64 rows of the scale of a group and row 16 (t / 32) + c.
    static __device__ __forceinline__ int scale(int t) { return t % 32 / 4 * 8 + t / 32 * 2; }
    static __device__ __forceinline__ u32 word(const u8* line, int t) {
        return *reinterpret_cast<const u32*>(line + t % 32 * 16 + t / 32 * 4);
    }

    // 16-bit scales of both rows, each twice in a register.
    static __device__ __forceinline__ void read_scales(u32 (&scale)[2], const u8* first) {
        const u32 both = *reinterpret_cast<const u32*>(first);
        scale[0] = __byte_perm(both, 0, 0x1010), scale[1] = __byte_perm(both, 0, 0x3232);
    }

    // Instruction `i` of a pair; `first` overwrites the sums.
    static __device__ __forceinline__ void multiply_add(float (&sums)[kTokens / 2], const u32* pair, int i, u64 tokens, bool first) {
        using W = Wgmma<kTokens>;
        if constexpr (kKind == kBfloat16) first ? W::rs_bf16_first(sums, pair + 4 * i, tokens) : W::rs_bf16(sums, pair + 4 * i, tokens);
        else first ? W::rs_f16_first(sums, pair + 4 * i, tokens) : W::rs_f16(sums, pair + 4 * i, tokens);
    }
};

// marlin-24: byte b of each half of word j of the lane with c', q is row 8 c' + 4 b + j. So the
// rows c and c + 8 of warp w are bytes c / 4 of words c % 4 of the lanes (2 w, q) and (2 w + 1, q):
// two words, without bank conflicts, and one instruction.
template <int kKind, int kTokens>
struct Marlin24 {
    static constexpr int kInputs = 32, kPair = 9;  // the last are the positions of both
    static constexpr int kPositionBytes = 256;
    static constexpr int kNextScale = 8;

    static __device__ __forceinline__ int channel(int n) { return n; }
    static __device__ __forceinline__ int scale(int t) { return t / 32 * 16 + t % 16 / 4 * 2 + t % 32 / 16; }
    static __device__ __forceinline__ u32 word(const u8* line, int t) {
        const u32* at = reinterpret_cast<const u32*>(line + t / 32 * 128 + t % 4 * 16 + t % 16 / 4 * 4);
        return __byte_perm(at[0], at[16], t % 32 < 16 ? 0x6240 : 0x7351);
    }

    // Positions of two lines: lanes 0 and 1 of four hold those of the first, 2 and 3 of the second,
    // each of 16 inputs, row c low, row c + 8 high. A word has the positions of rows n and n + 4.
    static __device__ __forceinline__ u32 positions(const u8* lines, int t) {
        const u8* line = lines + t % 4 / 2 * kPositionBytes;
        const u32* at = reinterpret_cast<const u32*>(line + t % 16 / 8 * 128 + t / 32 * 32 + t % 8 / 4 * 8 + t % 2 * 4);
        return __byte_perm(at[0], at[4], t % 32 < 16 ? 0x5410 : 0x7632);
    }

    static __device__ __forceinline__ void read_scales(u32 (&scale)[2], const u8* first) {
#pragma unroll
        for (int h = 0; h < 2; ++h) scale[h] = __byte_perm(reinterpret_cast<const u16*>(first)[h * kNextScale], 0, 0x1010);
    }

    static __device__ __forceinline__ void multiply_add(float (&sums)[kTokens / 2], const u32* pair, int i, u64 tokens, bool first) {
        if (i == 0) multiply_add<0>(sums, pair, pair[8], tokens, first);
        else multiply_add<1>(sums, pair + 4, pair[8], tokens, first);
    }

  private:
    // The lanes that hold the positions are 2 kSelector and the next, of four.
    template <int kSelector>
    static __device__ __forceinline__ void multiply_add(float (&sums)[kTokens / 2], const u32* a, u32 positions, u64 tokens, bool first) {
        using W = Wgmma<kTokens>;
        if constexpr (kKind == kBfloat16) {
            if (first) W::template sparse_bf16_first<kSelector>(sums, a, positions, tokens);
            else W::template sparse_bf16<kSelector>(sums, a, positions, tokens);
        } else {
            if (first) W::template sparse_f16_first<kSelector>(sums, a, positions, tokens);
            else W::template sparse_f16<kSelector>(sums, a, positions, tokens);
        }
    }
};
