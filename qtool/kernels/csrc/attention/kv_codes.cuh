// Packed keys and values as the A operand of mma.sync m16n8k16 (f16 in, f32 sums), straight from
// the cache's bytes.
//
// Stated once, with r = lane / 4, c = lane % 4, S = DIM / 16, a tile of 16 tokens:
//   row m (or contraction slot m) of the tile is token  (m % 8) / 2 + 4 * (m % 2) + 8 * (m / 8);
//   keys:   S steps over the channels; lane (r, c) reads bytes [c * W, (c + 1) * W) of rows r and
//           r + 8, where W is a quarter of a token's bytes. 4 bit: step s takes bytes s % 2 and
//           s % 2 + 2 of word s / 2, low nibbles (even channels) into slots 2c, 2c + 1, high ones
//           into 2c + 8, 2c + 9. 8 bit: step s is word s, in order;
//   values: S row tiles over the channels; lane (r, c) reads bytes [r * V, (r + 1) * V) of four
//           tokens, where V is an eighth of a token's bytes. Rows r and r + 8 of row tile i are
//           channels 2 (r S + i) and 2 (r S + i) + 1.
// Keys leave as halves c / 2^24 (even channel) and 16 c / 2^24 (odd): a nibble's bits are that
// subnormal number, and tensor cores multiply it exactly. Values leave as c - 8 and 16 (c - 8), so
// that long sums stay small. s8 codes as is.
#pragma once
#include "common/ptx.cuh"

constexpr int kSteps = DIM / 16;
constexpr int kTokenBytes = DIM * BITS / 8;
constexpr int kKeyBytes = kTokenBytes / 4, kValueBytes = kTokenBytes / 8;
constexpr int kKeyWords = (kKeyBytes + 3) / 4, kValueWords = (kValueBytes + 3) / 4;

// Bytes of a and b by the four hexadecimal digits of the selector, lowest first: 0 to 3 are those
// of a, 4 to 7 those of b.
__device__ __forceinline__ u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
    u32 d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}

// (x & kMask) | other in one instruction; the compiler makes it two of two immediates.
template <u32 kMask>
__device__ __forceinline__ u32 masked_or(u32 x, u32 other) {
    u32 d;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(x), "n"(kMask), "r"(other));
    return d;
}

// The token of row (or slot) r of the first half of a tile.
__device__ __forceinline__ int token_of(int r) { return r / 2 + 4 * (r % 2); }

// kBytes of shared memory, aligned to the largest power of two (up to 16) in kBytes.
template <int kBytes>
__device__ __forceinline__ void load_bytes(u32 (&w)[(kBytes + 3) / 4], u32 address) {
    if constexpr (kBytes % 16 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 16; ++i)
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(w[4 * i]), "=r"(w[4 * i + 1]), "=r"(w[4 * i + 2]), "=r"(w[4 * i + 3])
                         : "r"(address + 16 * i));
    } else if constexpr (kBytes % 8 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 8; ++i)
            asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                         : "=r"(w[2 * i]), "=r"(w[2 * i + 1])
                         : "r"(address + 8 * i));
    } else if constexpr (kBytes % 4 == 0) {
#pragma unroll
        for (int i = 0; i < kBytes / 4; ++i) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(w[i]) : "r"(address + 4 * i));
    } else {
        constexpr int kPiece = kBytes % 2 == 0 ? 2 : 1;
#pragma unroll
        for (int i = 0; i < (kBytes + 3) / 4; ++i) w[i] = 0;
#pragma unroll
        for (int i = 0; i < kBytes; i += kPiece) {
            u32 piece;
            if constexpr (kPiece == 2)
                asm volatile("ld.shared.u16 %0, [%1];" : "=r"(piece) : "r"(address + i));
            else
                asm volatile("ld.shared.u8 %0, [%1];" : "=r"(piece) : "r"(address + i));
            w[i / 4] |= piece << (8 * (i % 4));
        }
    }
}

// One byte in each half of `x`: the low and the high nibble as subnormal numbers.
__device__ __forceinline__ void subnormal_halves(u32 x, u32& low, u32& high) { low = x & 0x000F000F, high = x & 0x00F000F0; }

// The same nibbles about zero, c - 8 and 16 (c - 8); 8 bit: the two low and the two high s8 codes.
// In f16 the bits 0x6400 are 1024, and the lowest bit of its mantissa is worth 1, so 0x6400 | c is
// 1024 + c (MARLIN section 3.4). An s8 code c becomes c + 128 first, by its highest bit.
__device__ __forceinline__ void centred_halves(u32 x, u32& low, u32& high) {
    if constexpr (BITS == 4) {
        low = add_halves(masked_or<0x000F000F>(x, 0x64006400), 0xE408E408);   // 1024 + c - 1032
        high = add_halves(masked_or<0x00F000F0>(x, 0x64006400), 0xE480E480);  // 1024 + 16 c - 1152
    } else {
        x ^= 0x80808080;
        low = add_halves(permute(x, 0x64646464, 0x4140), 0xE480E480);
        high = add_halves(permute(x, 0x64646464, 0x4342), 0xE480E480);
    }
}

// Keys of rows r and r + 8 of a tile at shared address `tile`.
struct Keys {
    u32 words[2][kKeyWords];

    __device__ __forceinline__ void load(u32 tile, int lane) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = token_of(lane / 4) + 8 * half;
            load_bytes<kKeyBytes>(words[half], tile + token * kTokenBytes + lane % 4 * kKeyBytes);
            if constexpr (BITS == 4 && kSteps % 2)  // the last step has half a word
                words[half][kKeyWords - 1] = permute(words[half][kKeyWords - 1], 0, 0x4140);
        }
    }
    __device__ __forceinline__ void fragment(u32 (&a)[4], int step) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (BITS == 4)
                subnormal_halves(words[half][step / 2] >> (8 * (step % 2)), a[half], a[2 + half]);
            else
                centred_halves(words[half][step], a[half], a[2 + half]);
        }
    }
};

// Values of the four tokens in slots 2c, 2c + 1, 2c + 8, 2c + 9.
struct Values {
    u32 words[4][kValueWords];

    __device__ __forceinline__ void load(u32 tile, int lane) {
#pragma unroll
        for (int slot = 0; slot < 4; ++slot)
            load_bytes<kValueBytes>(words[slot], tile + (4 * slot + lane % 4) * kTokenBytes + lane / 4 * kValueBytes);
    }
    __device__ __forceinline__ void fragment(u32 (&a)[4], int row_tile) const {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const u32(&first)[kValueWords] = words[2 * pair], (&second)[kValueWords] = words[2 * pair + 1];
            u32 x;
            if constexpr (BITS == 4) {
                const int word = row_tile / 4;
                x = permute(first[word], second[word], row_tile % 4 < 2 ? 0x5410 : 0x7632) >> (8 * (row_tile % 2));
            } else {
                x = permute(first[row_tile / 2], second[row_tile / 2], row_tile % 2 ? 0x7362 : 0x5140);
            }
            centred_halves(x, a[2 * pair], a[2 * pair + 1]);
        }
    }
};

// d += a b: a 16 x 16 (rows r, r + 8 at slots 2c, 2c + 1; then at 2c + 8, 2c + 9), b 16 x 8.
__device__ __forceinline__ void multiply(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
