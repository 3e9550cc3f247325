// What the attention kernels share: query vectors, tiles of stored rows, blocks read by quads, and softmax tile by tile.
#pragma once
#include "append.cuh"

#ifndef CUDA_ON_CPU
#include <cuda_pipeline_primitives.h>
#endif

namespace attention {

constexpr int TILE = 32;    // keys; tiles lie on multiples of it of the absolute row
constexpr int READERS = 8;  // threads side by side that copy or unpack a stored row: one for each quad of a block

enum Block { SESSION, BLOCK_START, BLOCK_ROWS, BLOCK_POS, WORK_BEFORE, WORK, BLOCK_COLUMNS };

struct Shape {
    int heads, n_head, n_head_kv, dim_k, dim_v, window;
};

// ---- Quads ----------------------------------------------------------------------------------------------------------

DEVICE float4& four_at(float* at) { return *reinterpret_cast<float4*>(at); }
DEVICE const float4& four_at(const float* at) { return *reinterpret_cast<const float4*>(at); }

DEVICE float element(const float4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

DEVICE float4 plus(const float4& x, const float4& y) { return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w); }

DEVICE float4 scaled(const float4& x, float by) { return make_float4(x.x * by, x.y * by, x.z * by, x.w * by); }

DEVICE void multiply_add(float4& sums, const float4& x, const float4& y) {
    sums.x = __fmaf_rn(x.x, y.x, sums.x);
    sums.y = __fmaf_rn(x.y, y.y, sums.y);
    sums.z = __fmaf_rn(x.z, y.z, sums.z);
    sums.w = __fmaf_rn(x.w, y.w, sums.w);
}

DEVICE void multiply_add(float4& sums, float x, const float4& y) { multiply_add(sums, make_float4(x, x, x, x), y); }

DEVICE float dot(const float4& x, const float4& y, float sum) {
    return __fmaf_rn(x.w, y.w, __fmaf_rn(x.z, y.z, __fmaf_rn(x.y, y.y, __fmaf_rn(x.x, y.x, sum))));
}

// ---- Query vectors --------------------------------------------------------------------------------------------------

// What a thread block serves: vectors of one K/V head, `heads` of them from `head` on, of `rows` rows of the batch from `start`
// on. They see the keys [first, end) or a part of them.
struct Unit {
    int session, start, rows, pos, kv_head, head, heads, count, first, end;
};

DEVICE int first_key(int at, int window) { return window ? max(0, at - window + 1) : 0; }

// Of one of the blocks of rows, and of `part` among the parts of all groups.
DEVICE Unit unit_of(const i64* block, int part, const Shape& shape) {
    const int group = shape.n_head / shape.n_head_kv, parts = (group + shape.heads - 1) / shape.heads;
    Unit unit;
    unit.session = static_cast<int>(block[SESSION]);
    unit.start = static_cast<int>(block[BLOCK_START]);
    unit.rows = static_cast<int>(block[BLOCK_ROWS]);
    unit.pos = static_cast<int>(block[BLOCK_POS]);
    unit.kv_head = part / parts;
    const int before = part % parts * shape.heads;
    unit.head = unit.kv_head * group + before;
    unit.heads = min(shape.heads, group - before);
    unit.count = unit.rows * unit.heads;
    unit.first = first_key(unit.pos, shape.window);
    unit.end = unit.pos + unit.rows;
    return unit;
}

// Where a vector is among all of the batch, `n_head` a row.
DEVICE i64 place_of(const Unit& unit, int vector, int n_head) {
    return static_cast<i64>(unit.start + vector / unit.heads) * n_head + unit.head + vector % unit.heads;
}

// Puts quad `j` of vector `i` at element i * vector_stride + j * quad_stride; vectors that pad them to `vectors` are 0.
DEVICE void load_queries(
    const float* q, const Unit& unit, const Shape& shape, int vectors, float* to, int vector_stride, int quad_stride) {
    const int quads = shape.dim_k / 4;
    for (int i = threadIdx.x; i < vectors * quads; i += blockDim.x) {
        const int vector = i / quads, quad = i % quads;
        const float* from = q + place_of(unit, vector, shape.n_head) * shape.dim_k + quad * 4;
        four_at(to + vector * vector_stride + quad * quad_stride) = vector < unit.count ? four_at(from) : float4();
    }
}

// ---- Stored rows ----------------------------------------------------------------------------------------------------

// One head's part of a session's rows of K or V.
struct Stored {
    const u8* at;  // where absolute row 0 would have it
    int last;      // the last row that is known to be stored
    int stride;    // bytes from row to row
    int code, bytes;
    int room;  // bytes that a row's copy takes in shared memory: an odd number of words, so that rows start in different banks
};

DEVICE Stored stored_rows(i64 plane, i64 code, i64 base, int dim, int n_head_kv, const Unit& unit) {
    Stored rows;
    rows.code = static_cast<int>(code);
    rows.bytes = dim / 32 * block_bytes(rows.code);
    rows.room = 16 * ((rows.bytes + 29) / 16 | 1);
    rows.stride = n_head_kv * rows.bytes;
    rows.at = reinterpret_cast<const u8*>(plane - base * rows.stride + unit.kv_head * rows.bytes);
    rows.last = unit.end - 1;
    return rows;
}

DEVICE Stored stored_k(const i64* planes, const i64* bases, const Shape& shape, const Unit& unit) {
    const i64* plane = planes + unit.session * PLANE_COLUMNS;
    return stored_rows(plane[K_AT], plane[K_CODE], bases[unit.session], shape.dim_k, shape.n_head_kv, unit);
}

DEVICE Stored stored_v(const i64* planes, const i64* bases, const Shape& shape, const Unit& unit) {
    const i64* plane = planes + unit.session * PLANE_COLUMNS;
    return stored_rows(plane[V_AT], plane[V_CODE], bases[unit.session], shape.dim_v, shape.n_head_kv, unit);
}

// How far behind a multiple of 16 bytes a row starts, in its plane and in its copy.
DEVICE int phase_of(const Stored& rows, int row) {
    return (static_cast<u32>(reinterpret_cast<u64>(rows.at)) + static_cast<u32>(row) * static_cast<u32>(rows.stride)) & 15;
}

// Copies 16 bytes to shared memory. They are there after `wait_for_copies`, and for other threads after a barrier behind it.
DEVICE void copy_word(u8* to, const u8* from) {
#ifdef CUDA_ON_CPU
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
#else
    __pipeline_memcpy_async(to, from, 16);
#endif
}

DEVICE void wait_for_copies() {
#ifndef CUDA_ON_CPU
    __pipeline_commit();
    __pipeline_wait_prior(0);
#endif
}

// Copies the rows [first, last) of a tile, without waiting.
DEVICE void copy_rows(const Stored& rows, int tile, int first, int last, u8* to) {
    const int lane = threadIdx.x % READERS;
    for (int row = first + static_cast<int>(threadIdx.x) / READERS; row < last; row += blockDim.x / READERS) {
        const int phase = phase_of(rows, row), bytes = phase + rows.bytes;
        const u8* from = rows.at + static_cast<i64>(row) * rows.stride - phase;
        u8* copy = to + (row - tile) * rows.room;
        if (row < rows.last) {
#pragma unroll 1
            for (int at = lane * 16; at < bytes; at += READERS * 16) copy_word(copy + at, from + at);
        } else {  // its last word may not all be memory
#pragma unroll 1
            for (int at = phase + lane * 2; at < bytes; at += READERS * 2)
                *reinterpret_cast<u16*>(copy + at) = *reinterpret_cast<const u16*>(from + at);
        }
    }
}

// The same of K and V, of the rows from `first` to the end of its tile, but before `end`.
DEVICE void copy_tile(const Stored& k, const Stored& v, int first, int end, u8* to) {
    const int tile = first / TILE * TILE, last = min(end, tile + TILE);
    copy_rows(k, tile, first, last, to);
    copy_rows(v, tile, first, last, to + TILE * k.room);
}

DEVICE const u8* copied_row(const Stored& rows, const u8* copy, int tile, int key) {
    return copy + key * rows.room + phase_of(rows, tile + key);
}

// ---- Blocks of 32 elements ------------------------------------------------------------------------------------------

// A statement compiled for each format, as the constant FORMAT.
#define WITH_FORMAT(code, ...)                                          \
    switch (code) {                                                     \
        case Q8_0: { constexpr int FORMAT = Q8_0; __VA_ARGS__; break; } \
        case Q5_1: { constexpr int FORMAT = Q5_1; __VA_ARGS__; break; } \
        case Q4_0: { constexpr int FORMAT = Q4_0; __VA_ARGS__; break; } \
        case FP8: { constexpr int FORMAT = FP8; __VA_ARGS__; break; }   \
        default: { constexpr int FORMAT = F32; __VA_ARGS__; }           \
    }

DEVICE float half_in(const u8* at) { return __half2float(__ushort_as_half(*reinterpret_cast<const u16*>(at))); }

DEVICE u32 word_in(const u8* at) {
    const u16* halves = reinterpret_cast<const u16*>(at);
    return halves[0] | static_cast<u32>(halves[1]) << 16;
}

// A word's byte less `offset`, as the last bits of 2^23: that needs no conversion, of which a GPU does few at a time.
template <int BYTE>
DEVICE float byte_of(u32 word, int offset) {
#ifdef CUDA_ON_CPU
    const u32 bits = 0x4b000000u | (word >> 8 * BYTE & 0xffu);
#else
    const u32 bits = __byte_perm(word, 0x4b000000u, 0x7650 + BYTE);
#endif
    return __uint_as_float(bits) - static_cast<float>((1 << 23) + offset);
}

DEVICE float4 bytes_of(u32 word, int offset) {
    return make_float4(byte_of<0>(word, offset), byte_of<1>(word, offset), byte_of<2>(word, offset), byte_of<3>(word, offset));
}

// Four bits, each as bit 4 of a byte.
DEVICE u32 spread(u32 bits) { return ((bits & 15) * 0x00204081u & 0x01010101u) << 4; }

// The e4m3fn in the highest byte.
DEVICE float fp8_in(u32 word) {
    const u32 size = word >> 4 & 0x07f00000u;
    // 2^120 moves the exponent from bias 7 to 127, and so that of subnormals.
    const float value = size == 0x07f00000u ? __uint_as_float(0x7fc00000u) : __uint_as_float(size) * 0x1p120f;
    return __uint_as_float(__float_as_uint(value) | (word & 0x80000000u));
}

// Elements 4 * `quad` to 4 * `quad` + 3 of a half of a block, as `element_at` has them.
template <int CODE>
DEVICE float4 quad_at(const u8* block, int half, int quad) {
    if constexpr (CODE == Q8_0)
        return scaled(bytes_of(word_in(block + 2 + 16 * half + 4 * quad) ^ 0x80808080u, 128), half_in(block));
    if constexpr (CODE == Q5_1) {
        const u32* words = reinterpret_cast<const u32*>(block);
        const u32 nibbles = words[2 + quad] >> 4 * half & 0x0f0f0f0fu;
        const float bottom = half_in(block + 2);
        const float4 x = scaled(bytes_of(nibbles | spread(words[1] >> (16 * half + 4 * quad)), 0), half_in(block));
        return plus(x, make_float4(bottom, bottom, bottom, bottom));
    }
    if constexpr (CODE == Q4_0)
        return scaled(bytes_of(word_in(block + 2 + 4 * quad) >> 4 * half & 0x0f0f0f0fu, 8), half_in(block));
    if constexpr (CODE == FP8) {
        const u32 word = reinterpret_cast<const u32*>(block)[4 * half + quad];
        return make_float4(fp8_in(word << 24), fp8_in(word << 16), fp8_in(word << 8), fp8_in(word));
    }
    if constexpr (CODE == F32) return four_at(reinterpret_cast<const float*>(block) + 16 * half + 4 * quad);
}

// ---- Softmax --------------------------------------------------------------------------------------------------------

// e^x of x <= 0, operation by operation as in kernels/vector_math.py.
DEVICE float exp_of_negative(float x) {
    constexpr float rounder = 12582912.f;  // 1.5 * 2^23: added and taken away again, it rounds to an integer
    const float shifted = __fmaf_rn(1.4426950408889634f, x, rounder), whole = shifted - rounder;
    const u32 exponent = __float_as_uint(shifted) - __float_as_uint(rounder);
    const float rest = __fmaf_rn(-1.4286068203094172e-06f, whole, __fmaf_rn(-0.693145751953125f, whole, x));
    float power = __fmaf_rn(static_cast<float>(1. / 5040), rest, static_cast<float>(1. / 720));
    power = __fmaf_rn(rest, power, static_cast<float>(1. / 120));
    power = __fmaf_rn(rest, power, static_cast<float>(1. / 24));
    power = __fmaf_rn(rest, power, static_cast<float>(1. / 6));
    power = __fmaf_rn(rest, power, 0.5f);
    power = __fmaf_rn(rest, power, 1.f);
    power = __fmaf_rn(rest, power, 1.f);
    const u32 bits = __float_as_uint(power) + (exponent << 23), size = __float_as_uint(x) & MAGNITUDE;
    const float beyond = size > INFINITE ? x : 0.f;
    return size > __float_as_uint(87.f) ? beyond : __uint_as_float(bits);
}

DEVICE float warp_largest(float value) {
    for (int step = WARP / 2; step; step /= 2) value = max(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
}

DEVICE float warp_sum(float value) { return sum_of_16(value + __shfl_xor_sync(ALL_LANES, value, 16)); }

// Of each query vector, in shared memory: its position; the largest score so far and the sum of exp(score - peak); and what the
// last tile leaves: by what sums of before are to be multiplied, and which of its keys are seen, from x to before y.
struct Softmax {
    int2* seen;
    int* positions;
    float *peaks, *totals, *decays;
};

constexpr int SOFTMAX = 8;  // elements a vector, two of them only so that what comes behind is on a multiple of 16 bytes

DEVICE Softmax softmax_at(float* at, int vectors) {
    int* positions = reinterpret_cast<int*>(at) + 2 * vectors;
    return {reinterpret_cast<int2*>(at), positions, at + 3 * vectors, at + 4 * vectors, at + 5 * vectors};
}

// Of the unit's vectors, and of those that pad them to `vectors`, which stay as they begin.
DEVICE void begin(const Softmax& softmax, const Unit& unit, int vectors) {
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
        softmax.seen[i] = make_int2(0, TILE);
        softmax.positions[i] = unit.pos + i / unit.heads;
        softmax.peaks[i] = negative_infinity();
        softmax.totals[i] = 0.f;
        softmax.decays[i] = 1.f;
    }
}

DEVICE bool sees(const int2& seen, int key) { return seen.x <= key && key < seen.y; }

// A warp's turn at a tile of one vector, a key a lane: from the lane's score to its weight, 0 for a key that is not seen.
DEVICE float weigh(const Softmax& softmax, int vector, int tile, int window, float score) {
    const int at = softmax.positions[vector];
    const int2 seen = make_int2(max(first_key(at, window) - tile, 0), min(at + 1 - tile, TILE));
    float peak = softmax.peaks[vector], total = softmax.totals[vector], decay = 1.f, weight = 0.f;
    if (seen.x < seen.y) {
        if (!sees(seen, lane_id())) score = negative_infinity();
        const float top = warp_largest(score);
        if (top > peak) {
            decay = exp_of_negative(peak - top);
            peak = top;
            total *= decay;
        }
        weight = exp_of_negative(score - peak);
        total += warp_sum(weight);
    }
    __syncwarp();
    if (lane_id() == 0) {
        softmax.peaks[vector] = peak;
        softmax.totals[vector] = total;
        softmax.decays[vector] = decay;
        softmax.seen[vector] = seen;
    }
    return weight;
}

}  // namespace attention
