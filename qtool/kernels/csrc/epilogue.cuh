// Accumulators of Y^T -> scaled, biased rows of Y, through shared memory so that stores are 16 bytes wide. int32 sums
// are scaled here; the float totals of scaled groups only get the bias.
//
// A thread holds, for each block of 8 tokens, rows q and q + 8 (q = 16 warp + lane / 4) of tokens
// 2 (lane % 4) and the next: v[0], v[1] are row q, v[2], v[3] row q + 8.
#pragma once
#include "convert.cuh"
#include "params.cuh"

// Per-row constants of one thread, read before the main loop so that their latency hides under it.
struct Rows {
    float scale[2], bias[2];
    int zero[2];
    __device__ __forceinline__ void read(const Params& p, int n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = n + 8 * h;
            const bool valid = row < p.n;
            scale[h] = valid ? load_as_float(p.scale1, row, p.scale1_kind) : 0.f;
            zero[h] = p.zero1 ? (valid ? p.zero1[row] : 0) : 128;
            bias[h] = valid && p.bias ? load_as_float(p.bias, row, p.bias_kind) : 0.f;
        }
    }
};

// kZero: from each sum, `rows.zero` times the sum of the token's codes is subtracted first.
template <int kOut, bool kZero>
struct Epilogue {
    static constexpr bool kWide = kOut == kFloat32 || kOut == kInt32;
    static constexpr int kChunk = 32;                         // tokens staged at a time
    static constexpr int kStride = 64 * (kWide ? 4 : 2) + 16;  // bytes of a staged token; the 16 spread the banks
    static constexpr int kBytes = kChunk * kStride;            // of one warpgroup

    template <int kBlocks, class Sum>
    static __device__ __forceinline__ void store(const Params& p, const Sum (&acc)[4 * kBlocks], const Rows& rows,
                                                 const float* scales, const int* sums, u8* staging, int m, int m_end,
                                                 int n, int first_token, int wg, int t) {
        constexpr int kStep = kBlocks < kChunk / 8 ? kBlocks : kChunk / 8;
        const int lane = t % 32, warp = t / 32;
#pragma unroll
        for (int base = 0; base < kBlocks; base += kStep) {
#pragma unroll
            for (int j = 0; j < kStep; ++j) {
                if (base + j >= kBlocks) break;
                const Sum* v = acc + 4 * (base + j);
                const int token = first_token + 8 * (base + j) + 2 * (lane % 4);
                const float2 sx = *reinterpret_cast<const float2*>(scales + token);
                int2 sum = {0, 0};
                if constexpr (kZero) sum = *reinterpret_cast<const int2*>(sums + token);
                u32 packed[2];
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const float y0 = finish(v[2 * h], sx.x, sum.x, rows, h), y1 = finish(v[2 * h + 1], sx.y, sum.y, rows, h);
                    if constexpr (kWide) {
                        float* at = reinterpret_cast<float*>(staging + (8 * j + 2 * (lane % 4)) * kStride) + 16 * warp + lane / 4 + 8 * h;
                        at[0] = y0;
                        at[kStride / 4] = y1;
                    } else {
                        packed[h] = pack_pair<kOut>(y0, y1);
                    }
                }
                if constexpr (!kWide) {  // lanes 0-7 name the rows of the first 8 x 8 matrix, 8-15 of the second
                    const u32 at = smem_address(staging) + (8 * j + lane % 8) * kStride + 2 * (16 * warp + (lane & 8));
                    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(at),
                                 "r"(packed[0]), "r"(packed[1])
                                 : "memory");
                }
            }
            named_barrier(2 + wg, 128);
            write(p, staging, m + first_token + 8 * base, m_end, n, min(8 * kStep, 8 * (kBlocks - base)), t);
            named_barrier(2 + wg, 128);
        }
    }

  private:
    static __device__ __forceinline__ float finish(int v, float sx, int token_sum, const Rows& rows, int h) {
        if constexpr (kZero) v -= token_sum * rows.zero[h];
        if constexpr (kOut == kInt32) return __int_as_float(v);
        return fmaf(static_cast<float>(v) * sx, rows.scale[h], rows.bias[h]);
    }

    static __device__ __forceinline__ float finish(float v, float, int, const Rows& rows, int h) {
        static_assert(kOut != kInt32, "groups have no bare sums");
        return v + rows.bias[h];
    }

    static __device__ __forceinline__ void write(const Params& p, const u8* staging, int m, int m_end, int n, int tokens, int t) {
        constexpr int kBytesPerItem = kWide ? 4 : 2, kPieces = 64 * kBytesPerItem / 16;
        u8* out = static_cast<u8*>(p.out);
        for (int i = t; i < tokens * kPieces; i += 128) {
            const int token = i / kPieces, piece = i % kPieces;
            if (m + token >= m_end || n >= p.n) continue;
            const uint4 v = *reinterpret_cast<const uint4*>(staging + token * kStride + piece * 16);
            *reinterpret_cast<uint4*>(out + (static_cast<u64>(m + token) * p.n + n) * kBytesPerItem + piece * 16) = v;
        }
    }
};
