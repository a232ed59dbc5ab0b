// The copies from global memory into the stages of a team's ring, step after step: by cp.async
// (AsyncSource) or by Hopper's bulk copies (BulkSource). All threads of the team have one, and call
//   Source(p, m, n, step, t)      for the tile at token m and column n, from `step` on; t is the
//                                 thread's number in its team;
//   load(stage, side, bar, last)  to start the copies of the next step: tokens and codes to
//                                 `stage`, metadata to `side`, and if `last` (of the steps of a
//                                 group) its scales after the metadata; `bar` is the stage's
//                                 mbarrier;
//   skip()                        instead of load when no step is left;
//   wait(bar, parity)             until the oldest stage that is under way has arrived.
// AsyncSource does not use the mbarriers, BulkSource counts its bytes on them.
#pragma once
#include "mma/half_shape.cuh"

// Every thread of the team copies the same 16-byte chunks of each step by cp.async. Where there are
// tokens beyond M or columns beyond N nothing is copied, and the stage keeps what it held: the sums
// of these are not stored.
template <class S>
struct AsyncSource {
    const u8 *codes, *metadata, *scales, *tokens;  // what this thread copies next
    // Bytes from a row of tiles to the next, from a group's scales to the next, and between the
    // tokens that this thread copies.
    u64 code_row, metadata_row, scale_row, token_rows;
    u32 code_at, token_at;  // where its first chunks go in a stage
    int thread, valid_tokens;
    bool valid_codes, valid_metadata, valid_scales;

    // 16-byte chunks of the block's columns in a row of codes, a row of metadata and a group's
    // scales, and of a token.
    static constexpr int kChunks = 32 * S::kColumnWarps;
    static constexpr int kMetadataChunks = 16 * S::kColumnWarps, kScaleChunks = S::kColumns * S::kScaleBytes / 16;
    static constexpr int kPieces = S::kTokenBytes / 16;
    static constexpr int kTokensAtOnce = S::kTeamThreads / kPieces;

    __device__ __forceinline__ AsyncSource(const HalfParams& p, int m, int n, int step, int t) : thread(t) {
        const int chunk = t % kChunks, left = p.n - n;
        code_row = static_cast<u64>(p.n) * 8;
        codes = p.qweight + (static_cast<u64>(step) * S::kRows + t / kChunks) * code_row + n * 8ull + chunk * 16;
        code_at = S::kCodesAt + t * 16;
        valid_codes = chunk / 32 * 64 < left;

        metadata_row = static_cast<u64>(p.n) * 4;
        metadata = p.metadata + (static_cast<u64>(step) * S::kMetadataRows + t / kMetadataChunks) * metadata_row + n * 4ull +
                   t % kMetadataChunks * 16;
        valid_metadata = t % kMetadataChunks / 16 * 64 < left;

        scale_row = static_cast<u64>(p.n) * S::kScaleBytes;
        scales = p.scale + (static_cast<u64>(step / S::kGroupSteps) * S::kGroups + t / kScaleChunks) * scale_row +
                 static_cast<u64>(n) * S::kScaleBytes + t % kScaleChunks * 16;
        valid_scales = t % kScaleChunks * (16 / S::kScaleBytes) < left;

        const int token = t / kPieces, piece = t % kPieces;
        token_rows = static_cast<u64>(p.k) * (2 * kTokensAtOnce);
        tokens = p.x + (static_cast<u64>(m + token) * p.k + step * S::kStep) * 2 + piece * 16;
        // Swizzled over 128 bytes, as TMA does it.
        token_at = token * S::kTokenBytes + (piece ^ token % 8) * 16;
        valid_tokens = p.m - m - token;
    }

    // A thread copies the same piece of every kTokensAtOnce-th token. This is a multiple of 4, so
    // i % 8 is 0 or 4, and adding 4 modulo 8 flips one bit: (token + i) % 8 = token % 8 ^ i % 8.
    __device__ __forceinline__ void load(u32 stage, u32 side, u32, bool last) {
#pragma unroll
        for (int r = 0; r < S::kRows; r += S::kTokenWarps)
            if (valid_codes && (S::kRows % S::kTokenWarps == 0 || r + thread / kChunks < S::kRows))
                async_copy(stage + code_at + r * kChunks * 16, codes + r * code_row);
        codes += S::kRows * code_row;
        copy_rows<S::kMetadataRows, kMetadataChunks>(side, metadata, metadata_row, valid_metadata);
        metadata += S::kMetadataRows * metadata_row;
        if (last) {
            copy_rows<S::kGroups, kScaleChunks>(side + S::kMetadataBytes, scales, scale_row, valid_scales);
            scales += S::kGroups * scale_row;
        }
#pragma unroll
        for (int i = 0; i < S::kTileTokens; i += kTokensAtOnce)
            if (i < valid_tokens && (S::kTileTokens % kTokensAtOnce == 0 || i + thread / kPieces < S::kTileTokens))
                async_copy(stage + (token_at ^ i % 8 * 16) + i * S::kTokenBytes, tokens + i / kTokensAtOnce * token_rows);
        tokens += S::kTokenBytes;
        async_commit();
    }
    // An empty group of copies, so that wait() can count groups to the end.
    static __device__ __forceinline__ void skip() { async_commit(); }
    // kStages - 1 groups are under way when a step is waited for: all but the kStages - 2 latest
    // must have arrived.
    static __device__ __forceinline__ void wait(u32, u32) { async_wait<S::kStages - 2>(); }

    // Copies this thread's chunks of kCount rows of kRowChunks chunks each, from rows that are
    // row_bytes apart to shared memory without gaps.
    template <int kCount, int kRowChunks>
    __device__ __forceinline__ void copy_rows(u32 to, const u8* from, u64 row_bytes, bool valid) const {
        constexpr int kRowsAtOnce = S::kTeamThreads / kRowChunks > 0 ? S::kTeamThreads / kRowChunks : 1;
        static_assert(S::kTeamThreads % kRowChunks == 0, "a thread copies the same chunk of each row");
#pragma unroll
        for (int r = 0; r < kCount; r += kRowsAtOnce)
            if (valid && (kCount % kRowsAtOnce == 0 || r + thread / kRowChunks < kCount))
                async_copy(to + thread * 16 + r * kRowChunks * 16, from + r * row_bytes);
    }
};

// One thread of the team's first warp copies each step as boxes of the tensors (TMA); what lies
// beyond M or N arrives as zeros.
template <class S>
struct BulkSource {
    const HalfParams& p;
    int m, n, step;
    bool issues;  // this is the team's first warp

    __device__ __forceinline__ BulkSource(const HalfParams& p, int m, int n, int step, int t)
        : p(p), m(m), n(n), step(step), issues(uniform(t / 32) == 0) {
        if (threadIdx.x == 0) {
            prefetch_map(&p.x_map);
            prefetch_map(&p.codes_map);
            if constexpr (S::Weights::kSparse) prefetch_map(&p.metadata_map);
            if constexpr (S::kGroup != 0) prefetch_map(&p.scale_map);
        }
    }
    // Brings the first step's codes into L2 while the kernel ahead in the stream ends; it is called
    // before grid_wait, which codes permit (ptx.cuh). More than one step makes the whole slower
    // (measured).
    __device__ __forceinline__ void prefetch() const {
        if (issues && elect_one()) tensor_prefetch_l2(&p.codes_map, n, step * S::kRows);
    }
    __device__ __forceinline__ void load(u32 stage, u32 side, u32 bar, bool last) {
        if (issues && elect_one()) {
            mbar_expect(bar, S::kStageBytes + S::kMetadataBytes + (last ? S::kGroups * S::kGroupBytes : 0));
            tensor_copy(stage + S::kCodesAt, &p.codes_map, n, step * S::kRows, bar);
            tensor_copy(stage, &p.x_map, step * S::kStep, m, bar);
            if constexpr (S::Weights::kSparse) tensor_copy(side, &p.metadata_map, n, step * S::kRows, bar);
            if constexpr (S::kGroup != 0)
                if (last) tensor_copy(side + S::kMetadataBytes, &p.scale_map, n, step / S::kGroupSteps * S::kGroups, bar);
        }
        ++step;
    }
    static __device__ __forceinline__ void skip() {}
    static __device__ __forceinline__ void wait(u32 bar, u32 parity) { mbar_wait(bar, parity); }
};
