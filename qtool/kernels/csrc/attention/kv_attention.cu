// Decode attention over a packed cache: a block has a split of one kv head's tokens
// (flash-decoding), with online softmax,
//     S^T = K Q^T    P = 2^(S - max)    O^T = V^T P^T
// on tensor cores. Tokens are mma's 16 rows in the first product and its contraction in the second;
// the group's query rows are its 8 columns. Each warp of a block takes every WARPS-th tile of TILE
// tokens through its own cp.async ring. The parts of warps are added in their order, and those of
// splits too (kv_combine), which gives the same bits every time.
//
// With a code c, a scale s and a zero point z of its token (kv4), a key or value is s (c - z):
//     q.k = s (sum q c - z sum q)        sum p v = sum (p s) (c - 8) - sum (p s) (z - 8)
//
// The host (qtool/kernels/attention/kv_plan.py) defines DIM (head dimension), BITS (4 or 8), TILE
// (tokens), ROW_TILES (of 8 query rows in a block), WARPS, STAGES (of a ring), DTYPE, MASKED,
// CAPPED (soft cap), PAGED, MIN_BLOCKS, LONGEST and MOST_SPLITS.
//
// Legend: r = lane / 4, c = lane % 4; *rows* are the query rows of a kv head, group x queries,
// those of a query head together; bh = batch * heads + kv head.
#include "attention/kv_combine.cuh"
#include "attention/kv_state.cuh"

constexpr float kHidden = -3e38f;  // the score of a token that a row does not see

// The tokens that the block takes, tiles [begin, end), and those that its query rows see. Query t
// of a sequence's last `queries` tokens sees the tokens up to itself; with a window only the last
// p.window of these.
struct Span {
    int batch, length, all_see, begin, end;  // all_see: the tokens before it are seen by every row
    int limit[ROW_TILES][2];  // the first token that a row does not see

    __device__ __forceinline__ Span(const Params& p, int bh, int split, int row0, int lane) {
        batch = bh / p.heads;
        length = p.lengths ? min(max(p.lengths[batch], 0), p.tokens) : p.tokens;
        all_see = length - p.queries + 1;  // without a window
        const int oldest = p.window ? max(0, all_see - p.window) / TILE : 0;
        const int tiles = (length + TILE - 1) / TILE - oldest;
        int per_split = (tiles + p.splits - 1) / p.splits;
        if (PAGED) per_split = max(per_split, min((tiles + p.fewest - 1) / p.fewest, LONGEST * WARPS));
        per_split = (per_split + WARPS - 1) / WARPS * WARPS;
        begin = oldest + split * per_split;
        end = min(begin + per_split, oldest + tiles);
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) limit[n][j] = all_see + (row0 + 8 * n + 2 * (lane % 4) + j) % p.queries;
    }
    // Whether some row may not see some token of the tile that starts at token `first`.
    __device__ __forceinline__ bool hides(const Params& p, int first) const {
        return MASKED || first + TILE > all_see || (p.window && first < length - p.window);
    }
    // Gives kHidden to the scores of tokens that a row does not see.
    __device__ __forceinline__ void hide(const Params& p, Scores& s, int first, int lane) const {
#pragma unroll
        for (int u = 0; u < kTiles16; ++u)
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int token = first + 16 * u + 8 * (j / 2) + token_of(lane / 4), stop = limit[n][j % 2];
                    bool seen = token < stop && (!p.window || token >= stop - p.window);
                    if constexpr (MASKED) {
                        const u64 row = static_cast<u64>(batch * p.queries + stop - all_see) * p.mask_tokens;
                        seen = seen && token < p.mask_tokens && p.mask[row + token];
                    }
                    if (!seen) s[u][n][j] = kHidden;
                }
    }
};

// What is added to all scores of a row before the cap: the part that the keys' codes leave out. It
// is read anew for each tile, since registers are short.
__device__ __forceinline__ float shift(const Params& p, int first_row, int rows, int n, int j) {
    const int row = 8 * n + j;
    return p.shift && row < rows ? __ldg(p.shift + first_row + row) : 0.f;
}

// The scores of a tile, in base 2 (times log2 e): s (x - z * sum q) * factor, where x is the
// product of codes. A cap replaces a score y by cap * tanh(y / cap), with
// tanh(a) = 1 - 2 / (1 + e^(2 a)).
__device__ __forceinline__ void score(const Params& p, Scores& s, const Query& query, const Stage& stage, int lane,
                                      int first_row, int rows) {
    const float twice_over_cap = CAPPED ? __fdividef(2 * kLog2e, p.softcap) : 0.f;
#pragma unroll
    for (int u = 0; u < kTiles16; ++u) {
        Keys keys;
        keys.load(stage.keys() + 16 * u * kTokenBytes, lane);
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int j = 0; j < 4; ++j) s[u][n][j] = 0.f;
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            u32 a[4];
            keys.fragment(a, step);
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n) multiply(s[u][n], a, query.b[n][step]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float scale = 1.f, zero = 0.f;
            if constexpr (BITS == 4) {
                const int token = 16 * u + 8 * half + token_of(lane / 4);
                scale = stage.parameter(kKeyScale, token), zero = stage.parameter(kKeyZero, token);
            }
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    float& x = s[u][n][2 * half + j];
                    x = scale * (x - zero * query.sum[n][j]) * query.factor[n][j];
                    if constexpr (CAPPED) {
                        if (PAGED) x += shift(p, first_row, rows, n, j);
                        const float tanh = 1.f - __fdividef(2.f, 1.f + power_of_two(x * twice_over_cap));
                        x = p.softcap * kLog2e * tanh;
                    }
                }
        }
    }
}

// Adds the warps' parts in their order, each times 2^(its maximum - the largest). The sum goes to
// the output, divided by the sum of weights, or to this split's part.
__device__ __forceinline__ void merge(const Params& p, const float* parts, const float2* stats, int bh, int split, int row0) {
    const int rows = p.group * p.queries;
    for (int at = threadIdx.x; at < kRows * DIM / 2; at += 32 * WARPS) {
        const int row = at / (DIM / 2), place = at % (DIM / 2);
        if (row0 + row >= rows) break;
        float top = kNone, sum = 0.f;
        float2 value = make_float2(0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, stats[w * kRows + row].x);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float weight = power_of_two(stats[w * kRows + row].x - top);
            const float2 part = *reinterpret_cast<const float2*>(parts + (w * kRows + row) * kPitch + 2 * place);
            sum += weight * stats[w * kRows + row].y;
            value.x += weight * part.x, value.y += weight * part.y;
        }
        const int channel = 2 * (place % 8 * kSteps + place / 8);
        const u64 out_row = static_cast<u64>(bh) * rows + row0 + row;
        if constexpr (BITS == 8) {
            const float* const scale = static_cast<const float*>(p.v_scale) + bh % p.heads * DIM + channel;
            value.x *= scale[0], value.y *= scale[1];
        }
        if (p.splits == 1) {
            const float inverse = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
            const u32 pair = narrow(value.x * inverse) | static_cast<u32>(narrow(value.y * inverse)) << 16;
            *reinterpret_cast<u32*>(p.out + out_row * DIM + channel) = pair;
        } else {
            const u64 part = out_row * p.splits + split;
            if (place == 0) reinterpret_cast<float2*>(p.partial)[part] = make_float2(top, sum);
            float* const values = p.partial + static_cast<u64>(p.all_rows) * p.splits * 2 + part * DIM;
            *reinterpret_cast<float2*>(values + channel) = value;
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) kv_attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 memory[];
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int split = blockIdx.x % p.splits, block = blockIdx.x / p.splits;
    const int row0 = block % p.row_blocks * kRows, bh = block / p.row_blocks, rows = p.group * p.queries;
    grid_wait();
    grid_release();
    const Span span(p, bh, split, row0, lane);
    // A split without tokens writes a weight of 0: kv_combine does not use its values then.
    if (p.splits > 1 && span.begin >= span.end) {
        for (int row = threadIdx.x; row < kRows && row0 + row < rows; row += 32 * WARPS)
            reinterpret_cast<float2*>(p.partial)[(static_cast<u64>(bh) * rows + row0 + row) * p.splits + split] =
                make_float2(kNone, 0.f);
        return;
    }
    QueryWords words;
    words.load(p, bh, row0, rows, lane);
    const u32 ring = smem_address(memory) + warp * STAGES * kStageBytes;
    Source source(p, bh, span.begin + warp, span.end, lane);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (span.begin + warp + i * WARPS < span.end) source.copy(ring + i * kStageBytes, lane);
        source.advance();
        async_commit();
    }
    const Query query(words, p.scaling * (CAPPED ? 1.f : kLog2e), rows - row0, lane);
    const int lane_row = row0 + 2 * (lane % 4);
    State state;
    int slot = 0;
    for (int tile = span.begin + warp; tile < span.end; tile += WARPS) {
        async_wait<STAGES - 2>();
        __syncwarp();  // all lanes' copies have arrived, and all have left the stage filled next
        const Stage stage = {ring + slot * kStageBytes};
        const int freed = slot == 0 ? STAGES - 1 : slot - 1, first = tile * TILE;
        if (tile + (STAGES - 1) * WARPS < span.end) source.copy(ring + freed * kStageBytes, lane);
        source.advance();
        async_commit();
        slot = slot == STAGES - 1 ? 0 : slot + 1;

        if (BITS == 4 && first + TILE > span.length) stage.clear(span.length - first, lane);
        Scores s;
        score(p, s, query, stage, lane, bh * rows + lane_row, rows - lane_row);
        if (span.hides(p, first)) span.hide(p, s, first, lane);
        state.follow(s, stage, lane);
        state.add(s, stage, lane);
    }
    async_wait<0>();
    __syncthreads();  // the rings become the exchange: [WARPS][kRows][kPitch], then maxima and sums
    float* const parts = reinterpret_cast<float*>(memory);
    float2* const stats = reinterpret_cast<float2*>(parts + WARPS * kRows * kPitch);
    state.store(parts + warp * kRows * kPitch, stats + warp * kRows, lane);
    __syncthreads();
    merge(p, parts, stats, bh, split, row0);
}
