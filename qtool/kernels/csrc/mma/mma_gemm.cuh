// The integer GEMM by mma.sync: Y^T = W X^T with sums in int32, or in float if groups of
// inputs have scales. It was made for Ampere and Ada, and runs on newer GPUs too.
//
// A block multiplies tiles of kRows output channels by kTokens tokens; mma_work.cuh says which, and
// which input channels of each. Its warps form kTokenWarps x kRowWarps: each owns 32 rows and
// kWarpTokens tokens of the tile, and multiplies all of the block's input channels. Steps of 128
// input channels pass through a ring of kStages stages in shared memory, filled by cp.async.
// Operand (mma_w4a8.cuh, mma_s4.cuh) says what a stage holds, loads it, and multiplies it with
// fragments that it reads straight from the packed layout.
//
// The tiles of the first kRows rows come first, one for each kTokens tokens; then those of the next
// rows.
//
// Legend: M tokens, N output channels, K input channels; a *row* is an output channel n, as the
// weight is mma's left operand; a *step* is 128 input channels, a *stage* the part of the ring that
// holds one; a *block of tokens* is 8. With c = lane / 4 and q = lane % 4 a lane has the sums
// [i][j][r] of rows 16 i + c (r = 0, 1) and 16 i + c + 8 (r = 2, 3) of its warp, for the tokens
// 8 j + 2 q (r even) and 8 j + 2 q + 1 (r odd).
#pragma once
#include "common/convert.cuh"
#include "mma/mma_ptx.cuh"
#include "mma/mma_work.cuh"

// Operand gives: Sum, the type of the sums; kStageBytes; kMixed (some steps have tokens of 8 bits);
// kScaled (its sums are floats, scaled already); kZero (the zero point of a row, zero1, times the
// sum of a token's codes is subtracted); load, the copies of a step; multiply, its products. kOut:
// enum Kind of Y.
template <class Operand, int kOut, int kRowWarps, int kTokenWarps, int kWarpTokens, int kStages>
struct MmaGemm {
    static constexpr int kThreads = 32 * kRowWarps * kTokenWarps;
    static constexpr int kRows = 32 * kRowWarps, kTokens = kTokenWarps * kWarpTokens, kBlocks = kWarpTokens / 8;
    using Sum = typename Operand::Sum;
    using Sums = Sum[2][kBlocks][4];

    // The epilogue writes the output through shared memory, where the ring was, kChunk blocks of
    // tokens of each warp at a time. An output has kItem bytes, a token there kPitch; the 16 bytes
    // between tokens spread the banks.
    static constexpr bool kWide = kOut == kFloat32 || kOut == kInt32;
    static constexpr int kItem = kWide ? 4 : 2, kPitch = kRows * kItem + 16;
    static constexpr int kChunk = kBlocks < 4 ? kBlocks : 4;
    static constexpr int kStagingBytes = 8 * kChunk * kTokenWarps * kPitch;
    static constexpr int kRingBytes = kStages * Operand::kStageBytes;
    static constexpr int kMaskAt = kRingBytes > kStagingBytes ? kRingBytes : kStagingBytes;
    static constexpr int kSharedBytes = kMaskAt + 4 * StreamK<Operand::kMixed>::kMaskWords;
    static_assert(kSharedBytes <= SHARED_BYTES, "the host reserved too little shared memory");

    // The whole kernel. The share of the block is [first, last); its tiles are taken from the last
    // to the first.
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
            if (to < work.steps) {  // only of the last tile: another block has the end of it
                write_partial(p, sums);
            } else {
                if (from > 0) add_partials(p, work, sums, tile);
                store(p, shared, sums, tile);
            }
        }
    }

  private:
    // The first token and the first row of a tile.
    static __device__ __forceinline__ int token_of(const MmaParams& p, int tile) { return tile % p.token_tiles * kTokens; }
    static __device__ __forceinline__ int row_of(const MmaParams& p, int tile) { return tile / p.token_tiles * kRows; }

    // Adds the products of steps [from, to) of a tile to `sums`. kStages - 1 steps are under way
    // ahead of the one that is multiplied. A fetch beyond `to` copies nothing but still closes a
    // group of copies, so that "all but the kStages - 2 latest groups" is the step at hand at the
    // end of the loop as well.
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
            // All threads' copies of this step have arrived, and all warps have left the stage that
            // is filled next, which held the step before.
            __syncthreads();
            fetch(step + kStages - 1);
            Operand::multiply(sums, ring + (step - from) % kStages * Operand::kStageBytes, work.eight_bit(step));
        }
        // The epilogue and the next tile reuse the ring.
        async_wait<0>();
        __syncthreads();
    }

    // Where a block leaves the sums of a tile that another block stores: [register][thread] in
    // global memory, so that a warp writes and reads 128 bytes at once. Returns this thread's
    // first.
    static __device__ __forceinline__ u32* partial_of(const MmaParams& p, int block) {
        return p.partial + static_cast<u64>(block) * 8 * kBlocks * kThreads + threadIdx.x;
    }
    // Leaves the sums there, then sets the block's flag: each thread's fence makes its own sums
    // visible to all blocks, the barrier collects the threads, and the flag is released by one of
    // them.
    static __device__ __forceinline__ void write_partial(const MmaParams& p, const Sums& sums) {
        u32* to = partial_of(p, blockIdx.x);
        const u32* from = reinterpret_cast<const u32*>(sums);
#pragma unroll
        for (int i = 0; i < 8 * kBlocks; ++i) to[i * kThreads] = from[i];
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) release(p.ready + blockIdx.x);
    }
    // Adds the sums of the blocks that have the tile's first steps: `first` to the one before this.
    // They are always added in the order of the blocks, so that the same inputs give the same
    // floats. The threads wait for the flags in parallel, and the barrier passes on what each of
    // them has seen. The loads are from L2 (__ldcg), since L1 could hold older bytes.
    static __device__ __forceinline__ void add_partials(const MmaParams& p, const StreamK<Operand::kMixed>& work, Sums& sums, int tile) {
        int first = blockIdx.x - 1;
        while (Place{tile, 0} < work.begin(first)) --first;
        for (int block = first + threadIdx.x; block < blockIdx.x; block += kThreads)
            if (work.begin(block) < work.begin(block + 1)) acquire(p.ready + block);
        __syncthreads();
        Sum* own = reinterpret_cast<Sum*>(sums);
        for (int block = first; block < blockIdx.x; ++block) {
            if (!(work.begin(block) < work.begin(block + 1))) continue;
            const Sum* from = reinterpret_cast<const Sum*>(partial_of(p, block));
#pragma unroll
            for (int i = 0; i < 8 * kBlocks; ++i) own[i] += __ldcg(from + i * kThreads);
        }
    }

    // Scale, bias and zero point of a lane's four rows n, n + 8, n + 16, n + 24, as [16-row
    // fragment][second row]. Rows beyond the weight get zeros; their sums are not stored.
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

    // Turns the sums of a tile into outputs and stores them. A lane's sums are of few rows of many
    // tokens, but a row of Y is a token: through shared memory the stores become 16 bytes wide.
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
            __syncthreads();  // all warps have written their part
            copy_out(p, staging, n, m, base);
            __syncthreads();  // it has been read, and may be overwritten
        }
    }

    // One output: of an exact sum, (v - token_sum * zero) * sx * scale + bias, or the bits of the
    // integer itself; of floats, which are scaled, v + bias.
    static __device__ __forceinline__ float finish(int v, float sx, int token_sum, float scale, int zero, float bias) {
        if constexpr (Operand::kZero) v -= token_sum * zero;
        if constexpr (kOut == kInt32) return __int_as_float(v);
        return fmaf(static_cast<float>(v) * sx, scale, bias);
    }
    static __device__ __forceinline__ float finish(float v, float, int, float, int, float bias) {
        static_assert(kOut != kInt32, "groups have no bare sums");
        return v + bias;
    }
    // Stores one output of kItem bytes to shared memory.
    static __device__ __forceinline__ void write(u8* to, float v) {
        if constexpr (kWide) *reinterpret_cast<float*>(to) = v;
        else *reinterpret_cast<u16*>(to) = static_cast<u16>(pack_pair<kOut>(v, 0.f));
    }

    // Copies the staged blocks of tokens [base, base + kChunk) of each warp to Y, 16 bytes of a
    // token's rows at a time: slot is the token in shared memory, piece the 16 bytes.
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
