// The GEMM of this project on Ampere and Ada: Y^T = W X^T by mma.sync, integers in int32.
//
// A warp owns 32 output channels and kWarpTokens tokens. Stages of 128 input channels pass through a ring in shared
// memory by cp.async; Operand says what a stage holds and multiplies it, fragments straight from the packed layout.
//
// Legend: a *row* is an output channel n; a *step* 128 input channels; a warp's sums are [2][tokens / 8][4]: rows
// 16 i + q, + 8 (q = lane / 4) of tokens 2 (lane % 4) and the next, in the order (row, token) 00 01 10 11.
#pragma once
#include "common/convert.cuh"
#include "mma/mma_ptx.cuh"
#include "mma/mma_work.cuh"

template <class Operand, int kOut, int kRowWarps, int kTokenWarps, int kWarpTokens, int kStages>
struct MmaGemm {
    static constexpr int kThreads = 32 * kRowWarps * kTokenWarps;
    static constexpr int kRows = 32 * kRowWarps, kTokens = kTokenWarps * kWarpTokens, kBlocks = kWarpTokens / 8;
    using Sum = typename Operand::Sum;
    using Sums = Sum[2][kBlocks][4];

    // The epilogue stages some of the tokens at a time where the ring was.
    static constexpr bool kWide = kOut == kFloat32 || kOut == kInt32;
    static constexpr int kItem = kWide ? 4 : 2, kPitch = kRows * kItem + 16;
    static constexpr int kChunk = kBlocks < 4 ? kBlocks : 4;  // blocks of 8 tokens of each warp
    static constexpr int kStagingBytes = 8 * kChunk * kTokenWarps * kPitch;
    static constexpr int kRingBytes = kStages * Operand::kStageBytes;
    static constexpr int kMaskAt = kRingBytes > kStagingBytes ? kRingBytes : kStagingBytes;
    static constexpr int kSharedBytes = kMaskAt + 4 * StreamK<Operand::kMixed>::kMaskWords;
    static_assert(kSharedBytes <= SHARED_BYTES, "the host reserved too little shared memory");

    static __device__ __forceinline__ void run(const MmaParams& p) {
        grid_wait();
        grid_release();
        extern __shared__ __align__(128) u8 shared[];
        const StreamK<Operand::kMixed> work(p, reinterpret_cast<u32*>(shared + kMaskAt));
        const Place first = work.begin(blockIdx.x), last = work.begin(blockIdx.x + 1);
        if (!(first < last)) return;
        for (int tile = last.step ? last.tile : last.tile - 1; tile >= first.tile; --tile) {
            const int from = tile == first.tile ? first.step : 0, to = tile == last.tile ? last.step : work.steps;
            Sums sums = {};
            multiply(p, work, shared, sums, tile, from, to);
            if (to < work.steps) {
                lend(p, sums);
            } else {
                if (from > 0) collect(p, work, sums, tile);
                store(p, shared, sums, tile);
            }
        }
    }

  private:
    static __device__ __forceinline__ int token_of(const MmaParams& p, int tile) { return tile % p.token_tiles * kTokens; }
    static __device__ __forceinline__ int row_of(const MmaParams& p, int tile) { return tile / p.token_tiles * kRows; }

    static __device__ __forceinline__ void multiply(const MmaParams& p, const StreamK<Operand::kMixed>& work, u8* shared,
                                                    Sums& sums, int tile, int from, int to) {
        const u32 ring = smem_address(shared);
        const int n = row_of(p, tile), m = token_of(p, tile);
        const auto fetch = [&](int step) {
            const u32 stage = ring + (step - from) % kStages * Operand::kStageBytes;
            if (step < to) Operand::load(p, stage, n, m, step, work.eight_bit(step));
            async_commit();
        };
        for (int i = 0; i < kStages - 1; ++i) fetch(from + i);
        for (int step = from; step < to; ++step) {
            async_wait<kStages - 2>();
            __syncthreads();  // everyone's copies have arrived, and everyone has left the slot that is filled next
            fetch(step + kStages - 1);
            Operand::multiply(sums, ring + (step - from) % kStages * Operand::kStageBytes, work.eight_bit(step));
        }
        async_wait<0>();
        __syncthreads();
    }

    // Sums that another block finishes go through global memory, in the order of registers and threads.
    static __device__ __forceinline__ u32* lent(const MmaParams& p, int block) {
        return p.partial + static_cast<u64>(block) * 8 * kBlocks * kThreads + threadIdx.x;
    }
    static __device__ __forceinline__ void lend(const MmaParams& p, const Sums& sums) {
        u32* to = lent(p, blockIdx.x);
        const u32* from = reinterpret_cast<const u32*>(sums);
#pragma unroll
        for (int i = 0; i < 8 * kBlocks; ++i) to[i * kThreads] = from[i];
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) release(p.ready + blockIdx.x);
    }
    // The sums of the blocks that have a tile's first steps, added to this one's, always in the same order: the same
    // inputs give the same floats.
    static __device__ __forceinline__ void collect(const MmaParams& p, const StreamK<Operand::kMixed>& work, Sums& sums, int tile) {
        int first = blockIdx.x - 1;
        while (Place{tile, 0} < work.begin(first)) --first;
        for (int block = first + threadIdx.x; block < blockIdx.x; block += kThreads)
            if (work.begin(block) < work.begin(block + 1)) acquire(p.ready + block);
        __syncthreads();
        Sum* own = reinterpret_cast<Sum*>(sums);
        for (int block = first; block < blockIdx.x; ++block) {
            if (!(work.begin(block) < work.begin(block + 1))) continue;
            const Sum* from = reinterpret_cast<const Sum*>(lent(p, block));
#pragma unroll
            for (int i = 0; i < 8 * kBlocks; ++i) own[i] += __ldcg(from + i * kThreads);
        }
    }

    // Per-row constants of a thread.
    struct Rows {
        float scale[2][2], bias[2][2];
        int zero[2][2];
        __device__ __forceinline__ Rows(const MmaParams& p, int n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = n + 8 * i;
                const bool valid = row < p.n;
                if constexpr (Operand::kScaled) scale[i / 2][i % 2] = 1.f;
                else scale[i / 2][i % 2] = valid ? load_as_float(p.scale1, row, p.scale1_kind) : 0.f;
                bias[i / 2][i % 2] = valid && p.bias ? load_as_float(p.bias, row, p.bias_kind) : 0.f;
                zero[i / 2][i % 2] = Operand::kZero && valid ? p.zero1[row] : 0;
            }
        }
    };

    static __device__ __forceinline__ void store(const MmaParams& p, u8* staging, const Sums& sums, int tile) {
        const int lane = threadIdx.x % 32, row_warp = threadIdx.x / 32 % kRowWarps, token_warp = threadIdx.x / 32 / kRowWarps;
        const int n = row_of(p, tile), m = token_of(p, tile), row = 32 * row_warp + lane / 4;
        const Rows rows(p, n + row);
#pragma unroll
        for (int base = 0; base < kBlocks; base += kChunk) {
#pragma unroll
            for (int j = 0; j < kChunk; ++j) {
                if (base + j >= kBlocks) break;
                const int token = m + token_warp * kWarpTokens + 8 * (base + j) + 2 * (lane % 4);
                u8* at = staging + (8 * (token_warp * kChunk + j) + 2 * (lane % 4)) * kPitch + row * kItem;
#pragma unroll
                for (int c = 0; c < 2; ++c) {
                    const bool valid = token + c < p.m;
                    const float sx = !Operand::kScaled && valid ? p.token_scale[token + c] : 1.f;
                    const int token_sum = Operand::kZero && valid ? p.token_sum[token + c] : 0;
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int frag = i / 2, h = i % 2;
                        write(at + c * kPitch + 8 * i * kItem,
                              finish(sums[frag][base + j][2 * h + c], sx, token_sum, rows.scale[frag][h], rows.zero[frag][h], rows.bias[frag][h]));
                    }
                }
            }
            __syncthreads();
            copy_out(p, staging, n, m, base);
            __syncthreads();
        }
    }

    static __device__ __forceinline__ float finish(int v, float sx, int token_sum, float scale, int zero, float bias) {
        if constexpr (Operand::kZero) v -= token_sum * zero;
        if constexpr (kOut == kInt32) return __int_as_float(v);
        return fmaf(static_cast<float>(v) * sx, scale, bias);
    }
    static __device__ __forceinline__ float finish(float v, float, int, float, int, float bias) {
        static_assert(kOut != kInt32, "groups have no bare sums");
        return v + bias;
    }
    static __device__ __forceinline__ void write(u8* to, float v) {
        if constexpr (kWide) *reinterpret_cast<float*>(to) = v;
        else *reinterpret_cast<u16*>(to) = static_cast<u16>(pack_pair<kOut>(v, 0.f));
    }

    static __device__ __forceinline__ void copy_out(const MmaParams& p, const u8* staging, int n, int m, int base) {
        constexpr int kPieces = kRows * kItem / 16, kPerWarp = 8 * kChunk;
        for (int i = threadIdx.x; i < kPerWarp * kTokenWarps * kPieces; i += kThreads) {
            const int slot = i / kPieces, piece = i % kPieces;
            const int in_warp = 8 * base + slot % kPerWarp, token = m + slot / kPerWarp * kWarpTokens + in_warp;
            const int row = n + piece * (16 / kItem);
            if (in_warp >= kWarpTokens || token >= p.m || row >= p.n) continue;
            const uint4 v = *reinterpret_cast<const uint4*>(staging + slot * kPitch + piece * 16);
            *reinterpret_cast<uint4*>(static_cast<u8*>(p.out) + (static_cast<u64>(token) * p.n + row) * kItem) = v;
        }
    }
};
