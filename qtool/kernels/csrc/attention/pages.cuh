// A page of a paged cache (qtool/kernels/attention/paged_cache.py). Head by head it has the codes
// of 64 keys, the codes of 64 values, and four f16 per token: scales and zero points of the keys,
// then of the values.
#pragma once
#include "common/ptx.cuh"

constexpr int kPageTokens = 64;
constexpr int kPageCodes = kPageTokens * DIM * BITS / 8;       // bytes of a head's keys, or values
constexpr int kPageHead = 2 * kPageCodes + 8 * kPageTokens;  // bytes of a head
