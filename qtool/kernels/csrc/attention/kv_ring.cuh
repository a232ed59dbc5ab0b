// A warp's ring of shared memory: TILE tokens of keys, values and their parameters a stage, filled
// by cp.async.
#pragma once
#include "common/async_copy.cuh"
#include "attention/kv_codes.cuh"
#include "attention/kv_params.cuh"
#include "attention/pages.cuh"

constexpr int kCodeBytes = TILE * kTokenBytes, kParamBytes = 2 * TILE;
constexpr int kPageTiles = kPageTokens / TILE;
constexpr int kStageBytes = 2 * kCodeBytes + (BITS == 4 ? 4 * kParamBytes : 0);

// 16 bytes, and the rest of their 128 into L2: the next lanes ask for it.
__device__ __forceinline__ void copy_line(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

enum Parameter { kKeyScale, kKeyZero, kValueScale, kValueZero };

// One filled stage: keys, values, and kv4's four parameters of every token.
struct Stage {
    u32 address;

    __device__ __forceinline__ u32 keys() const { return address; }
    __device__ __forceinline__ u32 values() const { return address + kCodeBytes; }
    __device__ __forceinline__ u32 parameters(int which) const { return address + 2 * kCodeBytes + which * kParamBytes; }
    __device__ __forceinline__ float parameter(int which, int token) const {
        u16 h;
        asm volatile("ld.shared.u16 %0, [%1];" : "=h"(h) : "r"(parameters(which) + 2 * token));
        return half_as_float(h, kFloat16);
    }
    // Bits of the largest scale among the values: halves above 0 are ordered as their bits.
    __device__ __forceinline__ int largest_scale(int lane) const {
        u32 bits = 0;
#pragma unroll
        for (int i = 0; i < TILE; i += 32) {
            u32 here = 0;
            if (i + lane < TILE)
                asm volatile("ld.shared.u16 %0, [%1];" : "=r"(here) : "r"(parameters(kValueScale) + 2 * (i + lane)));
            bits = max(bits, here);
        }
        return static_cast<int>(__reduce_max_sync(0xFFFFFFFF, bits));
    }
    // Zeros for the values' parameters of unwritten tokens, from `written` on: 0 times NaN would be
    // NaN.
    __device__ __forceinline__ void clear(int written, int lane) const {
        for (int i = lane; i < TILE; i += 32)
            if (i >= written)
                asm volatile("st.shared.u16 [%0], %2;\nst.shared.u16 [%1], %2;" ::"r"(parameters(kValueScale) + 2 * i),
                             "r"(parameters(kValueZero) + 2 * i), "h"(static_cast<u16>(0))
                             : "memory");
        __syncwarp();
    }
};

// The copies of a lane for each tile of its warp: 16 bytes of every 512 of keys, of values, and of
// one of the parameters.
struct Source {
    const u8 *keys, *values, *params;
#if PAGED
    const u8* head;    // the head's part of the first page
    const int* table;  // of the sequence
    u64 page_stride;
    int tile, end, page;

    __device__ __forceinline__ Source(const Params& p, int bh, int first_tile, int end, int)
        : page_stride(p.page_stride), tile(first_tile), end(end) {
        head = p.k_codes + static_cast<u64>(bh % p.heads) * kPageHead;
        table = p.table + static_cast<u64>(bh / p.heads) * p.table_stride;
        look_up();
    }
    // Asked for a tile ahead of its copy.
    __device__ __forceinline__ void look_up() {
        if (tile < end) page = __ldg(table + tile / kPageTiles);
    }
    __device__ __forceinline__ void locate(int lane) {
        constexpr int kPieces = kParamBytes / 16;
        const int within = tile % kPageTiles;
        const u8* const part = head + page * page_stride;
        keys = part + within * kCodeBytes + 16 * lane;
        values = keys + kPageCodes;
        params = part + 2 * kPageCodes + lane / kPieces * (2 * kPageTokens) + within * kParamBytes +
                 16 * (lane % kPieces);
    }
    // To the warp's next tile.
    __device__ __forceinline__ void advance() { tile += WARPS, look_up(); }
#else
    __device__ __forceinline__ Source(const Params& p, int bh, int first_tile, int, int lane) {
        const u64 first_token = static_cast<u64>(bh) * p.capacity + first_tile * TILE;
        keys = p.k_codes + first_token * kTokenBytes + 16 * lane;
        values = p.v_codes + first_token * kTokenBytes + 16 * lane;
        constexpr int kPieces = kParamBytes / 16;
        const int array = lane / kPieces;
        const void* const from = array == 0 ? p.k_scale : array == 1 ? p.k_zero : array == 2 ? p.v_scale : p.v_zero;
        params = static_cast<const u8*>(from) + 2 * first_token + 16 * (lane % kPieces);
    }
    __device__ __forceinline__ void locate(int) {}
    __device__ __forceinline__ void advance() {  // to the warp's next tile
        keys += WARPS * kCodeBytes, values += WARPS * kCodeBytes, params += WARPS * kParamBytes;
    }
#endif
    __device__ __forceinline__ void copy(u32 stage, int lane) {
        locate(lane);
        const u32 to = stage + 16 * lane;
#pragma unroll
        for (int i = 0; i < kCodeBytes; i += 512) {
            if (kCodeBytes % 512 && i + 16 * lane >= kCodeBytes) break;
            copy_line(to + i, keys + i);
            copy_line(to + kCodeBytes + i, values + i);
        }
        if (BITS == 4 && lane < 4 * kParamBytes / 16) copy_line(to + 2 * kCodeBytes, params);
    }
};
