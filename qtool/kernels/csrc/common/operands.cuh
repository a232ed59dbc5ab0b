// The host's numbers of schemes and layouts, and the type of a GEMM's sums.
#pragma once

// Of W4A8 (SCHEMES in qtool/kernels/hopper/w4a8.py): LiquidQuant and QoQ with scales of groups
// below those of channels, and QoQ with scales of channels alone.
enum Scheme { kLqq = 0, kQoq = 1, kQoqChannel = 2 };
// Of s4 weights (LAYOUTS in qtool/kernels/hopper/w4ax.py): apex4 and w4ax-interleaved.
enum Layout { kApex4 = 0, kInterleaved = 1 };

// The sum over a whole output channel is an exact int32. If groups of inputs have their own scales
// (kGrouped), the scaled sums of the groups are added up as floats.
template <bool kGrouped>
struct SumOf {
    using Type = int;
};
template <>
struct SumOf<true> {
    using Type = float;
};
