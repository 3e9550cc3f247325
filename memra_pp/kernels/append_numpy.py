"""The body of `append` in plain NumPy: what `append_numba` does, for where numba is missing."""

from __future__ import annotations

import ctypes

import numpy as np

from ..cache.formats import BLOCK
from . import blocks
from ._arrays import F32Array, I64Array, U8Array
from .codes import CODE_BYTES, CODE_LARGEST, FORMAT_CODES

FORMATS = tuple(FORMAT_CODES)


def store_rows(k: F32Array, v: F32Array, planes: I64Array, spans: I64Array, places: I64Array) -> int:
    """As `append_numba.store_rows`."""
    sides = [(x, planes[:, at].tolist(), planes[:, code].tolist()) for x, at, code in ((k, 0, 2), (v, 1, 3))]
    before = 0
    for x, _, codes in sides:
        for code, (start, rows, _) in zip(codes, spans.tolist(), strict=True):
            bad = ~(np.abs(x[start : start + rows]) <= CODE_LARGEST[code])
            if bad.any():
                return int(before + start * x.shape[1] + bad.argmax())
        before += x.size
    for x, addresses, codes in sides:
        for address, code, (start, rows, _), (write, source, keep, _) in zip(
            addresses, codes, spans.tolist(), places.tolist(), strict=True
        ):
            size = x.shape[1] // BLOCK * CODE_BYTES[code]
            if keep:
                _bytes_at(address, keep * size)[:] = _bytes_at(address + source * size, keep * size)
            blocks.quantize_into(FORMATS[code], x[start : start + rows], _bytes_at(address + write * size, rows * size))
    return -1


def _bytes_at(address: int, size: int) -> U8Array:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
