// Softmax attention over the quantised rows of K/V layers, for the rows of a batch of sessions: the CPU kernel's job and its
// tables (kernels/attention_numba.py).
//
// Keys come in tiles of 32 that lie on multiples of 32 of their *absolute* row, and are shared out by splits of 256 that lie on
// multiples of 256: every sum has one order, and a row's bits depend on its query, its position and the stored rows alone, so
// decode and prefill go the same way. The order is not the CPU's, which makes a difference of 1e-6 at most.
//
// What a launch says:
//   planes, bases   i64 [sessions, 4], addresses on the device, and i64 [sessions], as on the CPU.
//   blocks          `Spans.blocks(height, window)`, i64 [n, 6]: at most `height` rows of one session each.
//   heads           query heads served together, 1 to group = n_head / n_head_kv; a group has parts = ceil(group / heads).
//   dim_k, dim_v    elements of a head, multiples of 32, at most 1024 and as many as shared memory has room for.
//   window          positions that a row sees; 0: all.
// A thread block serves the query vectors that one of `blocks` has in one part of a group, height * heads at most, and reads
// the stored rows once for all of them.
//
// Planes start on a multiple of 16 bytes. What a tile has of a head is copied to shared memory as it is, in words of 16 bytes;
// a row takes room(dim, format) = 16 * ((dim / 32 * bytes of a block + 29) / 16 | 1) bytes there. Where the sessions of a
// launch have different formats, the largest room counts.
#pragma once
#include "attention_splits.cuh"

#define SHAPE attention::Shape{heads, n_head, n_head_kv, dim_k, dim_v, window}
#define ARGUMENTS                                                                                                   \
    const float *__restrict__ q, const i64 *__restrict__ planes, const i64 *__restrict__ bases,                     \
        const i64 *__restrict__ blocks, int heads, int n_head, int n_head_kv, int dim_k, int dim_v, int window,     \
        float scale, float *__restrict__ out

// Queries, f32 [rows, n_head, dim_k], to `out`, f32 [rows, n_head, splits, dim_v + 4], of which `attend_combine` makes the result. The number in the name,
// VECTORS, is height * heads or more. `splits` is the most that any of `blocks` touches, from that of its first row's first key
// to that of its last row. Grid: (n_head_kv * parts, splits, n). Block: 128. Shared bytes:
//   4 * VECTORS * (dim_k + dim_v + 168) + 64 * (room(dim_k, K) + room(dim_v, V)).
// So many BLOCKS are to fit on a multiprocessor: that bounds the registers.
#define ATTEND_SPLIT(VECTORS, BLOCKS)                                           \
    KERNEL __launch_bounds__(128, BLOCKS) attend_split_##VECTORS(ARGUMENTS) {   \
        attention::split<VECTORS>(q, planes, bases, blocks, SHAPE, scale, out); \
    }
ATTEND_SPLIT(1, 8)
ATTEND_SPLIT(2, 6)
ATTEND_SPLIT(4, 5)
ATTEND_SPLIT(8, 4)
ATTEND_SPLIT(16, 2)

// Merges the splits of each row and head. Grid: (n_head, height, n). Block: 256.
KERNEL attend_combine(
    const float* __restrict__ results, const i64* __restrict__ blocks, int n_head, int dim_v, int window, int splits,
    float* __restrict__ out) {
    attention::combine(results, blocks, n_head, dim_v, window, splits, out);
}

#undef WITH_FORMAT
#undef ATTEND_SPLIT
#undef ARGUMENTS
#undef SHAPE
