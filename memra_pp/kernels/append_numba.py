"""The compiled body of `append`: rows of a batch checked, held rows moved, and the new ones packed, all in one call."""

from __future__ import annotations

import numpy as np

from . import blocks_numba as blocks
from ._arrays import F32Array, I64Array, U8Array
from ._jit import kernel
from .addresses import K_AT, K_CODE, V_AT, V_CODE
from .codes import CODE_BYTES, CODE_LARGEST
from .pointers import bytes_at
from .scalars import lowest_set
from .simd import as_bits, load, matches
from .spans import ROWS, START

WRITE, SOURCE, KEEP = range(3)
"""Columns of `places`: the physical row to write at, and from which row on how many are moved to row 0 before."""
MAGNITUDE = np.int32(0x7FFFFFFF)
LARGEST_BITS = tuple(int(np.float32(value).view(np.int32)) for value in CODE_LARGEST)


@kernel
def store_rows(k: F32Array, v: F32Array, planes: I64Array, spans: I64Array, places: I64Array) -> int:
    """Writes each session's rows of f32 `k [rows, kv_dim_k]` and `v [rows, kv_dim_v]` to its planes, and returns -1.

    Or writes nothing and returns the index of the first value that its format cannot keep; those of `v` follow `k`'s.
    """
    bad = _first_bad(k, planes[:, K_CODE], spans)
    if bad >= 0:
        return bad
    bad = _first_bad(v, planes[:, V_CODE], spans)
    if bad >= 0:
        return k.size + bad
    for session in range(len(spans)):
        _store(k, planes[session, K_AT], planes[session, K_CODE], spans[session], places[session])
        _store(v, planes[session, V_AT], planes[session, V_CODE], spans[session], places[session])
    return -1


@kernel
def _first_bad(x: F32Array, codes: I64Array, spans: I64Array) -> int:
    flat, width = x.reshape(-1), x.shape[1]
    for session in range(len(spans)):
        largest = np.int32(LARGEST_BITS[codes[session]])
        first = spans[session, START] * width
        for at in range(first, first + spans[session, ROWS] * width, 16):
            # As integers, magnitudes are in the order of the floats, and every NaN is above infinity.
            over = matches(as_bits(load(flat, at, 16)) & MAGNITUDE, ">", largest)
            if over != 0:
                return at + int(lowest_set(over))
    return -1


@kernel
def _store(x: F32Array, address: int, code: int, span: I64Array, place: I64Array) -> None:
    blocks_a_row = x.shape[1] // 32
    tok_bytes = blocks_a_row * CODE_BYTES[code]
    rows, kept = span[ROWS], place[KEEP] * tok_bytes
    if kept:
        plane = bytes_at(address, (place[SOURCE] + place[KEEP]) * tok_bytes)
        source = place[SOURCE] * tok_bytes
        for at in range(kept):
            plane[at] = plane[source + at]
    target = bytes_at(address + place[WRITE] * tok_bytes, rows * tok_bytes)
    _pack(code, x.reshape(-1)[span[START] * x.shape[1] :], target, rows * blocks_a_row)


@kernel
def _pack(code: int, x: F32Array, out: U8Array, count: int) -> None:
    if code == 0:
        blocks.quantize_q8_0(x, out, 0, count)
    elif code == 1:
        blocks.quantize_q5_1(x, out, 0, count)
    elif code == 2:
        blocks.quantize_q4_0(x, out, 0, count)
    elif code == 3:
        blocks.quantize_fp8(x, out, 0, count)
    else:
        blocks.quantize_f32(x, out, 0, count)
