// The block formats of the K/V cache: 32 elements a block, one warp packs a block, its lanes being the elements.
//
// Layouts and rounding are those of ggml's reference quantisers and, for e4m3fn, of the OCP format with saturation; what no
// integer holds (an infinity; a scale whose inverse is infinite) is stored as 0. See kernels/blocks_numba.py, the same on a CPU.
#pragma once
#include "common.cuh"

enum Format { Q8_0, Q5_1, Q4_0, FP8, F32 };

constexpr float LARGEST_F32 = 3.402823466e+38f;
constexpr float BELOW_HALF = 0.49999997f;  // the f32 under one half: trunc(x + BELOW_HALF with x's sign) rounds half away from 0

DEVICE int block_bytes(int code) { return code == Q8_0 ? 34 : code == Q5_1 ? 24 : code == Q4_0 ? 18 : code == FP8 ? 32 : 128; }

DEVICE float inverse_of(float scale) { return scale == 0.f ? 0.f : 1.f / scale; }

// Truncated to an integer; what is not finite gives 0.
DEVICE int whole(float x) { return (__float_as_uint(x) & MAGNITUDE) < INFINITE ? __float2int_rz(x) : 0; }

DEVICE void put_half(u8* at, float x) {
    const u16 bits = half_bits(x);
    at[0] = static_cast<u8>(bits);
    at[1] = static_cast<u8>(bits >> 8);
}

DEVICE float warp_min_f32(float value) {
    for (int step = WARP / 2; step; step /= 2) value = fminf(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
}

// f16 d = amax / 127, then 32 i8 rounded half away from zero.
DEVICE void pack_q8_0(float x, u8* out) {
    const int lane = lane_id();
    const float scale = __uint_as_float(warp_max(__float_as_uint(x) & MAGNITUDE)) / 127.f;
    const float value = x * inverse_of(scale);
    const float half_away = __uint_as_float(__float_as_uint(BELOW_HALF) | (__float_as_uint(value) & ~MAGNITUDE));
    if (lane == 0) put_half(out, scale);
    out[2 + lane] = static_cast<u8>(whole(value + half_away));
}

// f16 d = (max - min) / 31, f16 min, a u32 of fifth bits, 16 bytes of nibbles.
DEVICE void pack_q5_1(float x, u8* out) {
    const int lane = lane_id();
    float bottom = warp_min_f32(fminf(x, LARGEST_F32));
    const float top = -warp_min_f32(fminf(-x, LARGEST_F32));
    const u32 zeros = __ballot_sync(ALL_LANES, x == 0.f);
    // Of two equal minima the reference keeps the earlier one, sign and all.
    const float first_zero = __shfl_sync(ALL_LANES, x, zeros ? __ffs(zeros) - 1 : 0);
    if (bottom == 0.f) bottom = first_zero;
    float scale = top == bottom ? 0.f : (top - bottom) / 31.f;
    if (__any_sync(ALL_LANES, is_nan(x))) scale = bottom = __uint_as_float(0x7fc00000u);
    const int code = whole((x - bottom) * inverse_of(scale) + 0.5f);
    const u32 fifths = __ballot_sync(ALL_LANES, (code & 16) != 0);
    const int upper = __shfl_down_sync(ALL_LANES, code, 16);
    if (lane == 0) {
        put_half(out, scale);
        put_half(out + 2, bottom);
    }
    if (lane < 4) out[4 + lane] = static_cast<u8>(fifths >> 8 * lane);
    if (lane < 16) out[8 + lane] = static_cast<u8>((code & 15) | upper << 4);
}

// f16 d = m / -8 with m the first element of the largest magnitude, 16 bytes of nibbles.
DEVICE void pack_q4_0(float x, u8* out) {
    const int lane = lane_id();
    const u32 size = __float_as_uint(x) & MAGNITUDE;
    const u32 largest = warp_max(size);
    const int first = __ffs(__ballot_sync(ALL_LANES, size == largest)) - 1;
    const float extreme = __shfl_sync(ALL_LANES, x, first);
    const float scale = (largest ? extreme : 0.f) / -8.f;
    const int code = min(whole(x * inverse_of(scale) + 8.5f), 15);
    const int upper = __shfl_down_sync(ALL_LANES, code, 16);
    if (lane == 0) put_half(out, scale);
    if (lane < 16) out[2 + lane] = static_cast<u8>(code | upper << 4);
}

// An e4m3fn byte: nearest even, beyond 448 saturated, every NaN 0x7f.
DEVICE u8 to_fp8(float x) {
    const u32 bits = __float_as_uint(x), size = bits & MAGNITUDE, sign = bits >> 24 & 0x80;
    if (size > INFINITE) return 0x7f;
    if (size >= 0x43e80000u) return static_cast<u8>(126 | sign);
    // Below 2^-6 the step is 2^-9: that of f32 at 2^14, so one addition rounds.
    if (size < 0x3c800000u) return static_cast<u8>((__float_as_uint(__uint_as_float(size) + 16384.f) - 0x46800000u) | sign);
    // Rebias the exponent from 127 to 7 and round the mantissa from 23 bits to 3, half to even.
    return static_cast<u8>(((size + (size >> 20 & 1) + 0x7ffffu - (120u << 23)) >> 20) | sign);
}

DEVICE float from_fp8(u8 code) {
    const u32 size = code & 0x7f;
    // A subnormal is m / 8 * 2^-6; a normal one needs only its exponent moved from bias 7 to 127.
    const u32 tiny = __float_as_uint(static_cast<float>(size) * 0.001953125f);
    const u32 value = size == 0x7f ? 0x7fc00000u : size < 8 ? tiny : (size << 20) + (120u << 23);
    return __uint_as_float(value | (code & 0x80u) << 24);
}

// Packs this warp's block, lane `j` holding element `j`.
DEVICE void pack(int code, float x, u8* out) {
    if (code == Q8_0) pack_q8_0(x, out);
    else if (code == Q5_1) pack_q5_1(x, out);
    else if (code == Q4_0) pack_q4_0(x, out);
    else if (code == FP8) out[lane_id()] = to_fp8(x);
    else reinterpret_cast<float*>(out)[lane_id()] = x;
}

// Element `j` of a block.
DEVICE float element_at(int code, const u8* block, int j) {
    if (code == Q8_0) return static_cast<float>(static_cast<i8>(block[2 + j])) * half_at(block);
    if (code == Q5_1) {
        const int nibble = block[8 + (j & 15)] >> (j & 16 ? 4 : 0) & 15, fifth = block[4 + j / 8] >> (j & 7) & 1;
        return static_cast<float>(nibble | fifth << 4) * half_at(block) + half_at(block + 2);
    }
    if (code == Q4_0) return static_cast<float>((block[2 + (j & 15)] >> (j & 16 ? 4 : 0) & 15) - 8) * half_at(block);
    if (code == FP8) return from_fp8(block[j]);
    return reinterpret_cast<const float*>(block)[j];
}

// The largest magnitude that a format keeps, as bits: beyond it a block's f16 scale or minimum would be infinite.
DEVICE u32 largest_bits(int code) {
    const float largest = code == Q8_0 ? 127.f * 65504.f : code == Q5_1 ? 65504.f : 8.f * 65504.f;
    return code < FP8 ? __float_as_uint(largest) : INFINITE;
}

// Packs `blocks` blocks of f32. Grid: ceil(blocks / 8). Block: 256 threads, a warp a block of elements.
KERNEL quantise(int code, const float* __restrict__ x, u8* __restrict__ out, i64 blocks) {
    const i64 block = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + warp_id();
    if (block < blocks) pack(code, x[block * WARP + lane_id()], out + block * block_bytes(code));
}

// Unpacks `blocks` blocks. Grid and block as of `quantise`.
KERNEL dequantise(int code, const u8* __restrict__ packed, float* __restrict__ out, i64 blocks) {
    const i64 block = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + warp_id();
    if (block < blocks) out[block * WARP + lane_id()] = element_at(code, packed + block * block_bytes(code), lane_id());
}
