// The host's numbers of schemes and layouts, and what the sums of a GEMM are.
#pragma once

enum Scheme { kLqq = 0, kQoq = 1, kQoqChannel = 2 };
enum Layout { kApex4 = 0, kInterleaved = 1 };

// Of a whole channel int32, of scaled groups float.
template <bool kGrouped>
struct SumOf {
    using Type = int;
};
template <>
struct SumOf<true> {
    using Type = float;
};
