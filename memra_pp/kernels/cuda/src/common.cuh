// What every kernel file needs. One source for NVRTC on a GPU and for g++ on a CPU (CUDA_ON_CPU): no <stdint.h>, no <math.h>.
#pragma once

#ifndef CUDA_ON_CPU
#include <cuda_fp16.h>
#endif

typedef unsigned char u8;
typedef signed char i8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define KERNEL extern "C" __global__ void
#define DEVICE static __device__ __forceinline__

// `float* name`: the shared memory whose size the launch says.
#ifdef CUDA_ON_CPU
#define DYNAMIC_SHARED(name) float* name = reinterpret_cast<float*>(fibers::shared())
#else
#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) float name[]
#endif

constexpr u32 ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr u32 MAGNITUDE = 0x7fffffffu;
constexpr u32 INFINITE = 0x7f800000u;
constexpr float NOTHING = -0.f;  // changes no sum that it is added to: 0 would change a -0

// Columns of the table that says whose the rows of a batch are: a session's first row, its rows, and the position of the first.
enum Span { SPAN_START, SPAN_ROWS, SPAN_POS, SPAN_COLUMNS };

DEVICE int lane_id() { return threadIdx.x & (WARP - 1); }
DEVICE int warp_id() { return threadIdx.x / WARP; }

DEVICE float negative_infinity() { return __uint_as_float(0xff800000u); }
DEVICE bool is_nan(float x) { return (__float_as_uint(x) & MAGNITUDE) > INFINITE; }

// A little-endian f16 at any byte, as f32.
DEVICE float half_at(const u8* at) { return __half2float(__ushort_as_half(static_cast<u16>(at[0] | at[1] << 8))); }

// An f32 as the bits of an f16, rounded to nearest even; every NaN as 0x7e00.
DEVICE u16 half_bits(float x) { return is_nan(x) ? 0x7e00 : __half_as_ushort(__float2half_rn(x)); }

DEVICE u32 warp_max(u32 value) {
    for (int step = WARP / 2; step; step /= 2) {
        const u32 other = __shfl_xor_sync(ALL_LANES, value, step);
        value = other > value ? other : value;
    }
    return value;
}

// The sum of 16 lanes in the one order of every sum of 16: halves are added until one is left. All of the 16 get it.
DEVICE float sum_of_16(float value) {
    for (int step = 8; step; step /= 2) value = __fadd_rn(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
}
