// Rows entering K/V planes: values checked, held rows moved, new ones packed. Tables are those of the CPU kernels
// (kernels/append_numba.py), in device memory: where rows go is read there, so that a step can be launched before it is known.
#pragma once
#include "blocks.cuh"

enum Plane { K_AT, V_AT, K_CODE, V_CODE, PLANE_COLUMNS };
enum Place { PLACE_WRITE, PLACE_SOURCE, PLACE_KEEP, PLACE_BASE, PLACE_COLUMNS };

// The session that a row of the batch belongs to: the last one with rows that starts at or before it.
DEVICE int session_of(const i64* spans, int sessions, i64 row) {
    int low = 0, high = sessions - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (spans[middle * SPAN_COLUMNS + SPAN_START] <= row) low = middle;
        else high = middle - 1;
    }
    return low;
}

// The index of the first value that its format cannot keep goes to `*refused`, if it is less than what is there; those of `v`
// follow `k`'s. Grid: ceil(rows * (k_width + v_width) / 256). Block: 256.
KERNEL check_rows(
    const float* __restrict__ k, const float* __restrict__ v, const i64* __restrict__ planes, const i64* __restrict__ spans,
    int sessions, i64 rows, int k_width, int v_width, u64* refused) {
    const i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= rows * (k_width + v_width)) return;
    const bool of_k = at < rows * k_width;
    const i64 place = of_k ? at : at - rows * k_width;
    const int session = session_of(spans, sessions, place / (of_k ? k_width : v_width));
    const int code = static_cast<int>(planes[session * PLANE_COLUMNS + (of_k ? K_CODE : V_CODE)]);
    const u32 bits = __float_as_uint(of_k ? k[place] : v[place]) & MAGNITUDE;
    if (bits > largest_bits(code)) atomicMin(refused, static_cast<u64>(at));
}

// Writes each session's rows to its planes, unless `*refused` names a value. Grid: ceil(rows * (k_blocks + v_blocks) / 8).
// Block: 256, a warp a block of elements.
KERNEL append_rows(
    const float* __restrict__ k, const float* __restrict__ v, const i64* __restrict__ planes, const i64* __restrict__ spans,
    const i64* __restrict__ places, int sessions, i64 rows, int k_blocks, int v_blocks, const u64* __restrict__ refused) {
    const i64 unit = static_cast<i64>(blockIdx.x) * (blockDim.x / WARP) + warp_id();
    if (unit >= rows * (k_blocks + v_blocks) || *refused != ~0ull) return;  // whole warps leave together
    const bool of_k = unit < rows * k_blocks;
    const i64 index = of_k ? unit : unit - rows * k_blocks;
    const int blocks = of_k ? k_blocks : v_blocks;
    const i64 row = index / blocks, block = index % blocks;
    const int session = session_of(spans, sessions, row);
    const i64* plane = planes + session * PLANE_COLUMNS;
    const int code = static_cast<int>(plane[of_k ? K_CODE : V_CODE]);
    const i64 to = places[session * PLACE_COLUMNS + PLACE_WRITE] + row - spans[session * SPAN_COLUMNS + SPAN_START];
    u8* out = reinterpret_cast<u8*>(plane[of_k ? K_AT : V_AT]) + (to * blocks + block) * block_bytes(code);
    pack(code, (of_k ? k : v)[index * WARP + lane_id()], out);
}

// Copies `words` forward, in steps of a thread block: a step is read as a whole before any of it is written, so that what lies
// ahead is still there when the ranges overlap.
template <class Word>
DEVICE void move_forward(Word* to, const Word* from, i64 words) {
    for (i64 step = 0; step < words; step += blockDim.x) {
        const i64 at = step + threadIdx.x;
        const Word word = at < words ? from[at] : Word();
        __syncthreads();
        if (at < words) to[at] = word;
        __syncthreads();
    }
}

template <class Word>
DEVICE void copy_apart(Word* to, const Word* from, i64 words) {
    for (i64 at = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x; at < words; at += static_cast<i64>(gridDim.x) * blockDim.x)
        to[at] = from[at];
}

// Moves `bytes` bytes within a plane to its front: by all blocks of the grid's x if the ranges are apart, else by the first.
template <class Word>
DEVICE void move_to_front(u8* plane, i64 source, i64 bytes) {
    Word* to = reinterpret_cast<Word*>(plane);
    const Word* from = reinterpret_cast<const Word*>(plane + source);
    const i64 words = bytes / static_cast<i64>(sizeof(Word));
    if (bytes <= source) copy_apart(to, from, words);
    else if (blockIdx.x == 0) move_forward(to, from, words);
}

// Moves each session's held rows to row 0 (a ring's rebase), unless `*refused` names a value.
// Grid: (blocks to share the copying, sessions, 2: K and V). Block: 256 to 1024.
KERNEL rebase_rows(
    const i64* __restrict__ planes, const i64* __restrict__ places, int k_blocks, int v_blocks, const u64* __restrict__ refused) {
    const i64* plane = planes + blockIdx.y * PLANE_COLUMNS;
    const i64* place = places + blockIdx.y * PLACE_COLUMNS;
    const bool of_k = blockIdx.z == 0;
    const i64 row_bytes = (of_k ? k_blocks : v_blocks) * block_bytes(static_cast<int>(plane[of_k ? K_CODE : V_CODE]));
    const i64 source = place[PLACE_SOURCE] * row_bytes, bytes = place[PLACE_KEEP] * row_bytes;
    if (bytes == 0 || source == 0 || *refused != ~0ull) return;
    u8* at = reinterpret_cast<u8*>(plane[of_k ? K_AT : V_AT]);
    if (source % 16 == 0 && bytes % 16 == 0) move_to_front<uint4>(at, source, bytes);
    else move_to_front<u16>(at, source, bytes);  // every block of every format is an even number of bytes
}
