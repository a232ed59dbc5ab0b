// The copies from global memory into a team's ring: two sources with the same calls.
#pragma once
#include "mma/half_shape.cuh"

// What one thread copies into each stage of its team, step after step. Tokens beyond M and columns beyond N stay what
// they were: their sums are not stored.
template <class S>
struct AsyncSource {
    const u8 *codes, *metadata, *scales, *tokens;
    u64 code_row, metadata_row, scale_row, token_rows;  // bytes between the rows that this thread copies from
    u32 code_at, token_at;
    int thread, valid_tokens;
    bool valid_codes, valid_metadata, valid_scales;

    static constexpr int kChunks = 32 * S::kColumnWarps;                                  // 16-byte chunks of a row of codes
    static constexpr int kMetadataChunks = 16 * S::kColumnWarps, kScaleChunks = S::kColumns * S::kScaleBytes / 16;
    static constexpr int kPieces = S::kTokenBytes / 16;                                   // of a token
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
        token_at = token * S::kTokenBytes + (piece ^ token % 8) * 16;
        valid_tokens = p.m - m - token;
    }

    // Starts the copies of one step; `last` of its group brings the scales.
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
    // Where there is nothing to copy any more, so that the groups keep their count.
    static __device__ __forceinline__ void skip() { async_commit(); }
    static __device__ __forceinline__ void wait(u32, u32) { async_wait<S::kStages - 2>(); }

    // kCount rows of kChunks chunks, some of them in each thread.
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

// The same by one thread of the team's first warp, as boxes. Beyond M and N they are zeros.
template <class S>
struct BulkSource {
    const HalfParams& p;
    int m, n, step;
    bool issues;

    __device__ __forceinline__ BulkSource(const HalfParams& p, int m, int n, int step, int t)
        : p(p), m(m), n(n), step(step), issues(uniform(t / 32) == 0) {
        if (threadIdx.x == 0) {
            prefetch_map(&p.x_map);
            prefetch_map(&p.codes_map);
            if constexpr (S::Weights::kSparse) prefetch_map(&p.metadata_map);
            if constexpr (S::kGroup != 0) prefetch_map(&p.scale_map);
        }
    }
    // The first codes into L2 while the previous kernel of the stream drains; more than one step costs (measured).
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
