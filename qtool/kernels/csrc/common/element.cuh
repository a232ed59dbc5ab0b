// Element: an item of a tensor of the dtype that the kernel is compiled for. The host defines
// DTYPE, a Kind. 16-bit items are kept as their bits; widen and narrow convert them to float and,
// rounding to nearest even, back.
#pragma once
#include "common/convert.cuh"

#if DTYPE == 0
typedef float Element;
__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float narrow(float v) { return v; }
__device__ __forceinline__ void round_pair(float&, float&) {}
#else
typedef u16 Element;
__device__ __forceinline__ float widen(u16 h) { return half_as_float(h, DTYPE); }
__device__ __forceinline__ u16 narrow(float v) { return float_as_half<DTYPE>(v); }
// narrow_pair puts `first` into the low half; round_pair rounds two floats to what an Element can
// hold, and leaves them floats.
__device__ __forceinline__ u32 narrow_pair(float first, float second) { return pack_pair<DTYPE>(first, second); }
__device__ __forceinline__ void round_pair(float& first, float& second) {
    const u32 both = narrow_pair(first, second);
    first = widen(static_cast<u16>(both)), second = widen(static_cast<u16>(both >> 16));
}
#endif
