// Many copies, or words, in one launch: a snapshot or a restore of all layers, and the lengths of all of them.
#pragma once
#include "common.cuh"

enum Copy { COPY_TO, COPY_FROM, COPY_BYTES, COPY_COLUMNS };

// Copies `table[y]`: `COPY_BYTES` bytes (a multiple of 4) between buffers apart, 16-byte aligned. Grid: (blocks to share a
// copy, copies). Block: 256.
KERNEL copy_many(const i64* __restrict__ table) {
    const i64* copy = table + blockIdx.y * COPY_COLUMNS;
    uint4* to = reinterpret_cast<uint4*>(copy[COPY_TO]);
    const uint4* from = reinterpret_cast<const uint4*>(copy[COPY_FROM]);
    const i64 bytes = copy[COPY_BYTES], words = bytes / 16, stride = static_cast<i64>(gridDim.x) * blockDim.x;
    const i64 first = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x;
    for (i64 at = first; at < words; at += stride) to[at] = from[at];
    const i64 tail = words * 4 + first;
    if (tail < bytes / 4) reinterpret_cast<u32*>(to)[tail] = reinterpret_cast<const u32*>(from)[tail];
}

// Sets the i32 at each `table[i]` (address, value). Grid: ceil(count / 256). Block: 256.
KERNEL set_words(const i64* __restrict__ table, int count) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) *reinterpret_cast<int*>(table[2 * at]) = static_cast<int>(table[2 * at + 1]);
}
