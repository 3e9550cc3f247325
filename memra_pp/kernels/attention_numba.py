"""The compiled body of `attention`: tiles of stored rows are unpacked once and used by a block of query vectors.

Softmax runs tile by tile: `peak` is the largest score so far, `total` the sum of `exp(score - peak)`, `sums` the values
weighted by it; a new peak scales the old `total` and `sums` down.
"""

from __future__ import annotations

import numpy as np

from . import blocks_numba
from ._arrays import F32Array, I64Array, U8Array
from ._jit import kernel
from .addresses import K_AT, K_CODE, V_AT, V_CODE
from .codes import CODE_BYTES
from .pointers import bytes_at
from .simd import fma, larger, load, load_spread, max_lanes, splat, store, sum_lanes, sum_lanes_of_four
from .spans import BLOCK_POS, BLOCK_ROWS, BLOCK_START, SESSION, WORK, WORK_BEFORE
from .vector_math import exp_of_negative

TILE = 32
"""Keys a tile, two vectors of scores."""


@kernel
def attend(
    q: F32Array,
    planes: I64Array,
    bases: I64Array,
    blocks: I64Array,
    shape: tuple[int, int, int, int, int],
    window: int,
    scale: np.float32,
    out: F32Array,
    lo: int,
    hi: int,
) -> None:
    """Every unit whose work has its middle in `[lo, hi)`; a unit is one of `blocks` (`Spans.blocks`) and a K/V head.

    `planes` and `bases` have a row a session. `shape` is `(rows of a block at most, n_head, n_head_kv, head_dim_k,
    head_dim_v)`; `window` 0 means every position is seen.
    """
    height, n_head, n_head_kv, dim_k, dim_v = shape
    group = n_head // n_head_kv
    vectors = height * group
    queries = _scratch(vectors * dim_k)
    keys = _scratch(TILE * dim_k)
    values = _scratch(TILE * dim_v)
    scores = _scratch(vectors * TILE)
    sums = _scratch(vectors * dim_v)
    peaks = _scratch(vectors)
    totals = _scratch(vectors)
    seen = np.empty((vectors, 2), np.int64)
    k_blocks, v_blocks = dim_k // 32, dim_v // 32
    for unit in range(len(blocks) * n_head_kv):
        head, block = unit % n_head_kv, blocks[unit // n_head_kv]
        if not lo <= block[WORK_BEFORE] * n_head_kv + block[WORK] * head + block[WORK] // 2 < hi:
            continue
        session, row0, block_rows, pos = block[SESSION], block[BLOCK_START], block[BLOCK_ROWS], block[BLOCK_POS]
        count = block_rows * group
        for row in range(block_rows):
            at = ((row0 + row) * n_head + head * group) * dim_k
            to = row * group * dim_k
            queries[to : to + group * dim_k] = q[at : at + group * dim_k]
        sums[:] = 0
        peaks[:] = -np.inf
        totals[:] = 0
        base, k_code, v_code = bases[session], planes[session, K_CODE], planes[session, V_CODE]
        k_bytes, v_bytes = n_head_kv * k_blocks * CODE_BYTES[k_code], n_head_kv * v_blocks * CODE_BYTES[v_code]
        first, end = _first_key(pos, window), pos + block_rows
        k_plane = bytes_at(planes[session, K_AT], (end - base) * k_bytes)
        v_plane = bytes_at(planes[session, V_AT], (end - base) * v_bytes)
        for tile in range(first // TILE * TILE, end, TILE):
            start, stop = max(first, tile), min(end, tile + TILE)
            k_at = (start - base) * k_bytes + head * k_blocks * CODE_BYTES[k_code]
            v_at = (start - base) * v_bytes + head * v_blocks * CODE_BYTES[v_code]
            _unpack(k_code, k_plane, k_at, k_bytes, keys, (start - tile) * dim_k, stop - start, k_blocks)
            _unpack(v_code, v_plane, v_at, v_bytes, values, (start - tile) * dim_v, stop - start, v_blocks)
            _score(queries, count, dim_k, keys, (start - tile) // 4 * 4, stop - tile, scale, scores)
            for vector in range(count):
                at = pos + vector // group
                seen[vector, 0] = max(_first_key(at, window) - tile, 0)
                seen[vector, 1] = min(at + 1 - tile, TILE)
                if seen[vector, 0] < seen[vector, 1]:
                    _weigh(scores, vector, seen[vector, 0], seen[vector, 1], peaks, totals, sums, dim_v)
            _add_values(scores, seen, count, values, dim_v, sums)
        for vector in range(count):
            to = ((row0 + vector // group) * n_head + head * group + vector % group) * dim_v
            inverse = np.float32(1) / totals[vector]
            for lane in range(0, dim_v, 32):
                store(out, to + lane, load(sums, vector * dim_v + lane, 32) * inverse)


@kernel
def _scratch(size: int) -> F32Array:
    """An uninitialised f32 array that starts on a cache line."""
    room = np.empty(size + 16, np.float32)
    skip = -room.ctypes.data // 4 % 16
    return room[skip : skip + size]


@kernel
def _first_key(at: int, window: int) -> int:
    return max(0, at - window + 1) if window else 0


@kernel
def _unpack(code: int, plane: U8Array, at: int, stride: int, out: F32Array, to: int, rows: int, blocks_a_row: int) -> None:
    """The elements of `rows` rows of one head, `stride` bytes apart, one after the other."""
    width = blocks_a_row * 32
    if code == 0:
        for row in range(rows):
            blocks_numba.dequantize_q8_0(plane, at + row * stride, out, to + row * width, blocks_a_row)
    elif code == 1:
        for row in range(rows):
            blocks_numba.dequantize_q5_1(plane, at + row * stride, out, to + row * width, blocks_a_row)
    elif code == 2:
        for row in range(rows):
            blocks_numba.dequantize_q4_0(plane, at + row * stride, out, to + row * width, blocks_a_row)
    elif code == 3:
        for row in range(rows):
            blocks_numba.dequantize_fp8(plane, at + row * stride, out, to + row * width, blocks_a_row)
    else:
        for row in range(rows):
            blocks_numba.dequantize_f32(plane, at + row * stride, out, to + row * width, blocks_a_row)


@kernel
def _score(
    queries: F32Array, count: int, dim: int, keys: F32Array, first: int, last: int, scale: np.float32, scores: F32Array
) -> None:
    """Scaled dot products with keys `[first, last)` of the tile, by fours: what overshoots is not looked at."""
    vector = 0
    while vector < count:
        for key in range(first, last, 4):
            to = vector * TILE + key
            if count - vector >= 2:
                _two_by_four(queries, vector * dim, dim, keys, key * dim, scale, scores, to)
            else:
                _one_by_four(queries, vector * dim, dim, keys, key * dim, scale, scores, to)
        vector += 2


@kernel
def _one_by_four(
    queries: F32Array, at: int, dim: int, keys: F32Array, key_at: int, scale: np.float32, scores: F32Array, to: int
) -> None:
    dot0 = dot1 = dot2 = dot3 = splat(np.float32(0), 16)
    for lane in range(0, dim, 16):
        query, key = load(queries, at + lane, 16), key_at + lane
        dot0 = fma(query, load(keys, key, 16), dot0)
        dot1 = fma(query, load(keys, key + dim, 16), dot1)
        dot2 = fma(query, load(keys, key + 2 * dim, 16), dot2)
        dot3 = fma(query, load(keys, key + 3 * dim, 16), dot3)
    store(scores, to, sum_lanes_of_four(dot0, dot1, dot2, dot3) * scale)


@kernel
def _two_by_four(
    queries: F32Array, at: int, dim: int, keys: F32Array, key_at: int, scale: np.float32, scores: F32Array, to: int
) -> None:
    dot0 = dot1 = dot2 = dot3 = splat(np.float32(0), 16)
    next0 = next1 = next2 = next3 = splat(np.float32(0), 16)
    for lane in range(0, dim, 16):
        query, following = load(queries, at + lane, 16), load(queries, at + dim + lane, 16)
        key0, key1 = load(keys, key_at + lane, 16), load(keys, key_at + dim + lane, 16)
        key2, key3 = load(keys, key_at + 2 * dim + lane, 16), load(keys, key_at + 3 * dim + lane, 16)
        dot0, next0 = fma(query, key0, dot0), fma(following, key0, next0)
        dot1, next1 = fma(query, key1, dot1), fma(following, key1, next1)
        dot2, next2 = fma(query, key2, dot2), fma(following, key2, next2)
        dot3, next3 = fma(query, key3, dot3), fma(following, key3, next3)
    store(scores, to, sum_lanes_of_four(dot0, dot1, dot2, dot3) * scale)
    store(scores, to + TILE, sum_lanes_of_four(next0, next1, next2, next3) * scale)


@kernel
def _weigh(
    scores: F32Array, vector: int, first: int, last: int, peaks: F32Array, totals: F32Array, sums: F32Array, dim: int
) -> None:
    """Turns the tile's scores of a query vector into weights, 0 outside `[first, last)`, and rescales what it has."""
    at = vector * TILE
    for key in range(first):
        scores[at + key] = -np.inf
    for key in range(last, TILE):
        scores[at + key] = -np.inf
    low, high = load(scores, at, 16), load(scores, at + 16, 16)
    top = max_lanes(larger(low, high))
    if top > peaks[vector]:
        decay = max_lanes(exp_of_negative(splat(peaks[vector] - top, 16)))
        peaks[vector] = top
        totals[vector] *= decay
        for lane in range(vector * dim, (vector + 1) * dim, 32):
            store(sums, lane, load(sums, lane, 32) * decay)
    low, high = exp_of_negative(low - peaks[vector]), exp_of_negative(high - peaks[vector])
    totals[vector] += sum_lanes(low + high)
    store(scores, at, low)
    store(scores, at + 16, high)


@kernel
def _add_values(weights: F32Array, seen: I64Array, count: int, values: F32Array, dim: int, sums: F32Array) -> None:
    """Adds the weighted values of each query vector's keys, in the order of the keys."""
    vector = 0
    while vector < count:
        if count - vector < 4:
            _one_sum(weights, vector, seen[vector, 0], seen[vector, 1], values, dim, sums)
            vector += 1
            continue
        start, stop = 0, TILE
        for member in range(vector, vector + 4):
            start, stop = max(start, seen[member, 0]), min(stop, seen[member, 1])
        if start < stop:
            for member in range(vector, vector + 4):
                _one_sum(weights, member, seen[member, 0], start, values, dim, sums)
            _four_sums(weights, vector, start, stop, values, dim, sums)
            for member in range(vector, vector + 4):
                _one_sum(weights, member, stop, seen[member, 1], values, dim, sums)
        else:
            for member in range(vector, vector + 4):
                _one_sum(weights, member, seen[member, 0], seen[member, 1], values, dim, sums)
        vector += 4


@kernel
def _one_sum(weights: F32Array, vector: int, first: int, last: int, values: F32Array, dim: int, sums: F32Array) -> None:
    if first >= last:
        return
    for lane in range(0, dim, 32):
        total = load(sums, vector * dim + lane, 32)
        for key in range(first, last):
            total = fma(load_spread(weights, vector * TILE + key, 32), load(values, key * dim + lane, 32), total)
        store(sums, vector * dim + lane, total)


@kernel
def _four_sums(weights: F32Array, vector: int, first: int, last: int, values: F32Array, dim: int, sums: F32Array) -> None:
    for lane in range(vector * dim, (vector + 1) * dim, 32):
        sum0, sum1 = load(sums, lane, 32), load(sums, lane + dim, 32)
        sum2, sum3 = load(sums, lane + 2 * dim, 32), load(sums, lane + 3 * dim, 32)
        for key in range(first, last):
            value = load(values, key * dim + lane - vector * dim, 32)
            at = vector * TILE + key
            sum0 = fma(load_spread(weights, at, 32), value, sum0)
            sum1 = fma(load_spread(weights, at + TILE, 32), value, sum1)
            sum2 = fma(load_spread(weights, at + 2 * TILE, 32), value, sum2)
            sum3 = fma(load_spread(weights, at + 3 * TILE, 32), value, sum3)
        store(sums, lane, sum0)
        store(sums, lane + dim, sum1)
        store(sums, lane + 2 * dim, sum2)
        store(sums, lane + 3 * dim, sum3)
