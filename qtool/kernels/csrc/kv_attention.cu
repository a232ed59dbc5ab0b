// Decode attention over a packed cache, a split of one kv head's tokens a block (flash-decoding), online softmax:
//     S^T = K Q^T    P = 2^(S - max)    O^T = V^T P^T
// on tensor cores, the tokens as mma's 16 rows, then its contraction, the group's query rows as its 8 columns. Each of
// the block's warps takes every WARPS-th tile of TILE tokens through its own cp.async ring; their parts are added in
// the order of the warps, the splits' in the order of the splits (kv_combine): the same bits every time.
//
// 4 bit: q.k = s (sum q c - z sum q);  sum p v = sum (p s) (c - 8) - sum (p s) (z - 8).
#include "kv_params.cuh"
#include "kv_codes.cuh"

constexpr float kHidden = -3e38f;  // the score of a token that a row does not see
constexpr int kRows = 8 * ROW_TILES, kTiles16 = TILE / 16;
constexpr int kCodeBytes = TILE * kTokenBytes, kParamBytes = 2 * TILE;
constexpr int kStageBytes = 2 * kCodeBytes + (BITS == 4 ? 4 * kParamBytes : 0);
constexpr int kLag = 8;       // the reference maximum may lie so many powers of two below the true one
constexpr int kHeadroom = 6;  // p s is kept below 2^(kHeadroom + kLag + 1), high in f16's range

__device__ __forceinline__ void async_copy(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ float half_at(u32 address) {
    u16 h;
    float f;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(address));
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
    return f;
}
__device__ __forceinline__ u32 pack_halves(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ void unpack_halves(u32 pair, float& low, float& high) {
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.f32.f16 %0, l;\ncvt.f32.f16 %1, h;\n}"
        : "=f"(low), "=f"(high)
        : "r"(pair));
}
__device__ __forceinline__ u32 transpose8x8(u32 pair) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
    return d;
}
// Over the eight lanes that share c = lane % 4.
__device__ __forceinline__ float largest(float v) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) v = fmaxf(v, __shfl_xor_sync(0xFFFFFFFF, v, step));
    return v;
}
__device__ __forceinline__ float total(float v) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) v += __shfl_xor_sync(0xFFFFFFFF, v, step);
    return v;
}

// What a lane copies of each tile: 16 bytes of every 512 of keys and of values, and of one of the four parameters.
struct Source {
    const u8 *keys, *values, *params;

    __device__ __forceinline__ Source(const Params& p, u64 first_token, int lane) {
        keys = p.k_codes + first_token * kTokenBytes + 16 * lane;
        values = p.v_codes + first_token * kTokenBytes + 16 * lane;
        constexpr int kPieces = kParamBytes / 16;
        const int array = lane / kPieces;
        const void* const from = array == 0 ? p.k_scale : array == 1 ? p.k_zero : array == 2 ? p.v_scale : p.v_zero;
        params = static_cast<const u8*>(from) + 2 * first_token + 16 * (lane % kPieces);
    }
    __device__ __forceinline__ void copy(u32 stage, int lane) const {
        const u32 to = stage + 16 * lane;
#pragma unroll
        for (int i = 0; i < kCodeBytes; i += 512) {
            if (kCodeBytes % 512 && i + 16 * lane >= kCodeBytes) break;
            async_copy(to + i, keys + i);
            async_copy(to + kCodeBytes + i, values + i);
        }
        if (BITS == 4 && lane < 4 * kParamBytes / 16) async_copy(to + 2 * kCodeBytes, params);
    }
    __device__ __forceinline__ void advance() {  // to the warp's next tile
        keys += WARPS * kCodeBytes, values += WARPS * kCodeBytes, params += WARPS * kParamBytes;
    }
};

// The lane's part of the query rows as they lie in memory, in the order of the key fragments' slots. They are asked for
// before the first tiles: behind those they would wait until the memory has delivered them all.
struct QueryWords {
    u32 words[ROW_TILES][kSteps][2];
    float scale[BITS == 8 ? kSteps : 1][4];  // kv8: of the keys' channels

    __device__ __forceinline__ void load(const Params& p, int bh, int row0, int rows, int lane) {
        const int r = lane / 4, c = lane % 4;
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            const int row = row0 + 8 * n + r;
            const u16* const q = p.query + (static_cast<u64>(bh) * rows + (row < rows ? row : row0)) * DIM;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                if constexpr (BITS == 4) {
                    const int byte = c * kKeyBytes + s / 2 * 4 + s % 2;
                    const int other = byte + (kSteps % 2 && s == kSteps - 1 ? 1 : 2);
                    words[n][s][0] = *reinterpret_cast<const u32*>(q + 2 * byte);
                    words[n][s][1] = *reinterpret_cast<const u32*>(q + 2 * other);
                } else {
                    const uint2 four = *reinterpret_cast<const uint2*>(q + c * kKeyBytes + 4 * s);
                    words[n][s][0] = four.x, words[n][s][1] = four.y;
                }
            }
        }
        if constexpr (BITS == 8) {
            const float* const scales = static_cast<const float*>(p.k_scale) + bh % p.heads * DIM + c * kKeyBytes;
#pragma unroll
            for (int s = 0; s < kSteps; ++s)
#pragma unroll
                for (int i = 0; i < 4; ++i) scale[s][i] = scales[4 * s + i];
        }
    }
    // Slots 2c, 2c + 1, 2c + 8, 2c + 9 of a step; kv8: times the keys' scales.
    __device__ __forceinline__ void slots(float (&f)[4], int n, int s) const {
        const u32 first = words[n][s][0], second = words[n][s][1];
        f[0] = widen(first & 0xFFFF), f[3] = widen(second >> 16);
        f[1] = widen(BITS == 4 ? second & 0xFFFF : first >> 16);
        f[2] = widen(BITS == 4 ? first >> 16 : second & 0xFFFF);
        if constexpr (BITS == 8) {
#pragma unroll
            for (int i = 0; i < 4; ++i) f[i] *= scale[s][i];
        }
    }
};

struct Query {
    u32 b[ROW_TILES][kSteps][2];  // rows scaled by a power of two into f16's range
    float factor[ROW_TILES][2];   // undoes it, and scales the scores, of columns 2c, 2c + 1
    float sum[ROW_TILES][2];      // of the row as it was rounded

    __device__ __forceinline__ Query(const QueryWords& from, float scaling, int valid_rows, int lane) {
        const int r = lane / 4, c = lane % 4;
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            float f[4], top = 0.f, sums = 0.f;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                from.slots(f, n, s);
#pragma unroll
                for (int i = 0; i < 4; ++i) top = fmaxf(top, fabsf(f[i]));
            }
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 1));
            top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, 2));
            const u32 exponent = min(253, max(1, static_cast<int>(__float_as_uint(top) >> 23)));
            const float down = 8 * n + r < valid_rows ? __uint_as_float((254 - exponent) << 23) : 0.f;
            const float odd = BITS == 4 ? 1.f / 16 : 1.f;
#pragma unroll
            for (int s = 0; s < kSteps; ++s) {
                from.slots(f, n, s);
                b[n][s][0] = pack_halves(f[0] * down, f[1] * down);
                b[n][s][1] = pack_halves(f[2] * down * odd, f[3] * down * odd);
                unpack_halves(b[n][s][0], f[0], f[1]);
                unpack_halves(b[n][s][1], f[2], f[3]);
                sums += (f[0] + f[1] + (f[2] + f[3]) * 16) * 0x1p-24f;  // as the codes are
            }
            sums += __shfl_xor_sync(0xFFFFFFFF, sums, 1);
            sums += __shfl_xor_sync(0xFFFFFFFF, sums, 2);
            const float up = __uint_as_float(exponent << 23) * (BITS == 4 ? 0x1p24f : 1.f) * scaling;
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                factor[n][j] = __shfl_sync(0xFFFFFFFF, up, 4 * (2 * c + j));
                sum[n][j] = __shfl_sync(0xFFFFFFFF, sums, 4 * (2 * c + j));
            }
        }
    }
};

// The running softmax and sums of a warp; index [n][j] is query row 8 n + 2c + j.
struct State {
    float top[ROW_TILES][2], sum[ROW_TILES][2];  // maximum in base 2; the lane's own share of the sum
    float zeros[ROW_TILES][2];                   // the lane's share of sum (p s) (z - 8)
    float o[ROW_TILES][kSteps][4];
    int exponent;  // of the largest value scale so far (f16's field): p s is kept times 2^(kHeadroom + 15 - exponent)
};

__device__ __forceinline__ float powers(int exponent) { return __uint_as_float((127 + exponent) << 23); }

extern "C" __global__ void __launch_bounds__(32 * WARPS, MIN_BLOCKS) kv_attention(const __grid_constant__ Params p) {
    extern __shared__ __align__(16) u8 memory[];
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, r = lane / 4, c = lane % 4;
    int block = blockIdx.x;
    const int split = block % p.splits;
    block /= p.splits;
    const int row0 = block % p.row_tiles * kRows, bh = block / p.row_tiles;
    const int batch = bh / p.heads, rows = p.group * p.queries;
#if __CUDA_ARCH__ >= 900
    grid_release();
    grid_wait();
#endif
    const int length = p.lengths ? min(max(p.lengths[batch], 0), p.tokens) : p.tokens;
    const int all_see = length - p.queries + 1;  // tokens that every query sees (without a window)
    const int oldest = p.window ? max(0, all_see - p.window) : 0;
    const int tiles = (length + TILE - 1) / TILE - oldest / TILE;
    const int per_split = ((tiles + p.splits - 1) / p.splits + WARPS - 1) / WARPS * WARPS;
    const int begin = oldest / TILE + split * per_split;
    const int end = min(begin + per_split, oldest / TILE + tiles);

    const u32 ring = smem_address(memory) + warp * STAGES * kStageBytes;
    QueryWords words;
    words.load(p, bh, row0, rows, lane);
    Source source(p, static_cast<u64>(bh) * p.capacity + (begin + warp) * TILE, lane);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        if (begin + warp + i * WARPS < end) source.copy(ring + i * kStageBytes, lane);
        source.advance();
        async_commit();
    }
    const Query query(words, p.scaling * (CAPPED ? 1.f : kLog2e), rows - row0, lane);
    int limit[ROW_TILES][2];  // the first token that a row does not see
    State state;
    state.exponent = BITS == 4 ? 0 : 15;  // kv8: p itself, below 1
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            limit[n][j] = all_see + (row0 + 8 * n + 2 * c + j) % p.queries;
            state.top[n][j] = kNone;
            state.sum[n][j] = state.zeros[n][j] = 0.f;
        }
#pragma unroll
        for (int i = 0; i < kSteps; ++i)
#pragma unroll
            for (int j = 0; j < 4; ++j) state.o[n][i][j] = 0.f;
    }

    const float twice_over_cap = CAPPED ? __fdividef(2 * kLog2e, p.softcap) : 0.f;
    int slot = 0;
    for (int tile = begin + warp; tile < end; tile += WARPS) {
        async_wait<STAGES - 2>();
        __syncwarp();
        const u32 stage = ring + slot * kStageBytes;
        {
            const int to = slot == 0 ? STAGES - 1 : slot - 1;
            if (tile + (STAGES - 1) * WARPS < end) source.copy(ring + to * kStageBytes, lane);
            source.advance();
            async_commit();
            slot = slot == STAGES - 1 ? 0 : slot + 1;
        }
        const u32 params = stage + 2 * kCodeBytes;
        const int first = tile * TILE;
        if (BITS == 4 && first + TILE > length) {  // values' parameters that nothing wrote
            for (int i = lane; i < TILE; i += 32)
                if (first + i >= length)
                    asm volatile("st.shared.u16 [%0], %2;\nst.shared.u16 [%1], %2;" ::"r"(params + 2 * kParamBytes + 2 * i),
                                 "r"(params + 3 * kParamBytes + 2 * i), "h"(static_cast<u16>(0))
                                 : "memory");
            __syncwarp();
        }

        float s[kTiles16][ROW_TILES][4];
#pragma unroll
        for (int u = 0; u < kTiles16; ++u) {
            Keys keys;
            keys.load(stage + 16 * u * kTokenBytes, lane);
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
                    const u32 at = params + 2 * (16 * u + 8 * half + token_of(r));
                    scale = half_at(at), zero = half_at(at + kParamBytes);
                }
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        float& x = s[u][n][2 * half + j];
                        x = scale * (x - zero * query.sum[n][j]) * query.factor[n][j];
                        if constexpr (CAPPED) {
                            const float capped = 1.f - __fdividef(2.f, 1.f + power_of_two(x * twice_over_cap));
                            x = p.softcap * kLog2e * capped;
                        }
                    }
            }
        }
        if (MASKED || first + TILE > all_see || (p.window && first < length - p.window)) {
#pragma unroll
            for (int u = 0; u < kTiles16; ++u)
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const int token = first + 16 * u + 8 * (j / 2) + token_of(r), end_of_row = limit[n][j % 2];
                        bool seen = token < end_of_row && (!p.window || token >= end_of_row - p.window);
                        if constexpr (MASKED) {
                            const u64 at = static_cast<u64>(batch * p.queries + end_of_row - all_see) * p.mask_tokens;
                            seen = seen && token < p.mask_tokens && p.mask[at + token];
                        }
                        if (!seen) s[u][n][j] = kHidden;
                    }
        }

        int exponent = state.exponent;
        if constexpr (BITS == 4) {
            u32 bits = 0;  // halves above 0 are ordered as their bits
#pragma unroll
            for (int i = 0; i < TILE; i += 32) {
                u32 here = 0;
                if (i + lane < TILE)
                    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(here) : "r"(params + 2 * kParamBytes + 2 * (i + lane)));
                bits = max(bits, here);
            }
            exponent = max(exponent, static_cast<int>(__reduce_max_sync(0xFFFFFFFF, bits) >> 10));
        }
        bool grew = exponent != state.exponent;
        float top[ROW_TILES][2];
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                float x = s[0][n][j];
#pragma unroll
                for (int u = 0; u < kTiles16; ++u) x = fmaxf(x, fmaxf(s[u][n][j], s[u][n][2 + j]));
                top[n][j] = largest(x);
                grew |= top[n][j] > state.top[n][j] + kLag;
            }
        if (__any_sync(0xFFFFFFFF, grew)) {
            const float shift = powers(state.exponent - exponent);
            state.exponent = exponent;
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float now = fmaxf(state.top[n][j], top[n][j]), kept = power_of_two(state.top[n][j] - now);
                    state.top[n][j] = now;
                    state.sum[n][j] *= kept;
                    state.zeros[n][j] *= kept * shift;
#pragma unroll
                    for (int i = 0; i < kSteps; ++i) {
                        state.o[n][i][j] *= kept * shift;
                        state.o[n][i][2 + j] *= kept * shift;
                    }
                }
        }

#pragma unroll
        for (int u = 0; u < kTiles16; ++u) {
            u32 weights[ROW_TILES][2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float scale = powers(kHeadroom + 15 - state.exponent), zero = 0.f;
                if constexpr (BITS == 4) {
                    const int token = 16 * u + 8 * half + token_of(r);
                    const u32 at = params + 2 * kParamBytes + 2 * token;
                    scale *= half_at(at);
                    zero = half_at(at + kParamBytes) - 8.f;
                }
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) {
                    float w[2];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const float weight = power_of_two(s[u][n][2 * half + j] - state.top[n][j]);
                        state.sum[n][j] += weight;
                        w[j] = weight * scale;
                        if (BITS == 4) state.zeros[n][j] += w[j] * zero;
                    }
                    weights[n][half] = transpose8x8(pack_halves(w[0], w[1]));
                }
            }
            Values values;
            values.load(stage + kCodeBytes + 16 * u * kTokenBytes, lane);
#pragma unroll
            for (int i = 0; i < kSteps; ++i) {
                u32 a[4];
                values.fragment(a, i);
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n) multiply(state.o[n][i], a, weights[n]);
            }
        }
    }

    // The rings become the exchange: [WARPS][kRows][kPitch] in the order (row tile of channels, lane's r, parity), then
    // maxima and sums. The pitch and the order keep the stores free of bank conflicts.
    async_wait<0>();
    __syncthreads();
    constexpr int kPitch = DIM + 4;
    float* const parts = reinterpret_cast<float*>(memory);
    float2* const stats = reinterpret_cast<float2*>(parts + WARPS * kRows * kPitch);
    const float undo = powers(state.exponent - kHeadroom - 15), odd = BITS == 4 ? 1.f / 16 : 1.f;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
            const int row = warp * kRows + 8 * n + 2 * c + j;
            const float zeros = total(state.zeros[n][j]), sum = total(state.sum[n][j]);
#pragma unroll
            for (int i = 0; i < kSteps; ++i)
                *reinterpret_cast<float2*>(parts + row * kPitch + 16 * i + 2 * r) = make_float2(
                    (state.o[n][i][j] - zeros) * undo, (state.o[n][i][2 + j] * odd - zeros) * undo);
            if (r == 0) stats[row] = make_float2(state.top[n][j], sum);
        }
    __syncthreads();
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

// One query row a block: the splits' parts in their order.
extern "C" __global__ void __launch_bounds__(DIM < 32 ? 32 : DIM) kv_combine(const __grid_constant__ Params p) {
    __shared__ float weights[MOST_SPLITS];
#if __CUDA_ARCH__ >= 900
    grid_release();
    grid_wait();
#endif
    const u64 row = blockIdx.x;
    const int channel = threadIdx.x;
    const float2* const stats = reinterpret_cast<const float2*>(p.partial) + row * p.splits;
    const float* const parts = p.partial + static_cast<u64>(p.all_rows) * p.splits * 2 + row * p.splits * DIM + channel;
    constexpr int kBatch = 16;  // loads in flight; the first ones while the weights are made
    float batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) batch[i] = i < p.splits && channel < DIM ? parts[i * DIM] : 0.f;
    if (channel < 32) {
        float top = kNone, sum = 0.f;
        for (int i = channel; i < p.splits; i += 32) top = fmaxf(top, stats[i].x);
#pragma unroll
        for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFF, top, step));
        for (int i = channel; i < MOST_SPLITS; i += 32) {
            weights[i] = i < p.splits ? power_of_two(stats[i].x - top) : 0.f;
            if (i < p.splits) sum += weights[i] * stats[i].y;
        }
#pragma unroll
        for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
        const float inverse = sum > 0.f ? __fdividef(1.f, sum) : 0.f;
        for (int i = channel; i < MOST_SPLITS; i += 32) weights[i] *= inverse;
    }
    __syncthreads();
    if (channel >= DIM) return;
    float value = 0.f;
    for (int first = 0;; first += kBatch) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) value += weights[first + i] * batch[i];
        if (first + kBatch >= p.splits) break;
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            batch[i] = first + kBatch + i < p.splits ? parts[(first + kBatch + i) * DIM] : 0.f;
    }
    p.out[row * DIM + channel] = narrow(value);
}
