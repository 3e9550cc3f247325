"""The block formats of the K/V cache in plain NumPy: the bytes of `blocks_numba`, for where numba is missing.

Same signatures: a quantiser packs blocks `[lo, hi)`; a dequantiser reads `blocks` blocks from byte `at` on and writes
their elements from element `to` on.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..cache.formats import BLOCK
from ._arrays import F32Array, U8Array

LARGEST = np.float32(np.finfo(np.float32).max)
CHUNK = 4096
"""Blocks worked on at a time, so that temporaries stay in the processor's cache."""


def quantize_q8_0(x: F32Array, out: U8Array, lo: int, hi: int) -> None:
    """f16 d = amax / 127, then 32 i8 rounded half away from zero (`block_q8_0`, 34 bytes)."""
    for elements, packed in _chunks(x, out, lo, hi, 34):
        with np.errstate(all="ignore"):
            scale = np.abs(elements).max(axis=1, keepdims=True) / np.float32(127)
            scaled = elements * _inverse(scale)
            rounded = scaled + np.copysign(np.float32(0.49999997), scaled)
        packed[:, :2] = _half_bytes(scale)
        packed[:, 2:] = _whole(rounded).astype(np.int8).view(np.uint8)


def quantize_q5_1(x: F32Array, out: U8Array, lo: int, hi: int) -> None:
    """f16 d = (max - min) / 31, f16 min, a u32 of fifth bits, 16 bytes of nibbles (`block_q5_1`, 24 bytes)."""
    for elements, packed in _chunks(x, out, lo, hi, 24):
        with np.errstate(all="ignore"):
            bottom = np.minimum(elements.min(axis=1, keepdims=True), LARGEST)
            top = np.maximum(elements.max(axis=1, keepdims=True), -LARGEST)
            # Of two equal minima the reference keeps the earlier one, the sign of a zero and all.
            earliest = np.take_along_axis(elements, (elements == bottom).argmax(axis=1)[:, None], axis=1)
            bottom = np.where(bottom == 0, earliest, bottom)
            scale = np.where(top == bottom, np.float32(0), (top - bottom) / np.float32(31))
            quants = _whole((elements - bottom) * _inverse(scale) + np.float32(0.5))
        packed[:, :2] = _half_bytes(scale)
        packed[:, 2:4] = _half_bytes(bottom)
        packed[:, 4:8] = np.packbits((quants >> 4).astype(np.uint8), axis=1, bitorder="little")
        packed[:, 8:] = (quants[:, :16] & 15) | ((quants[:, 16:] & 15) << 4)


def quantize_q4_0(x: F32Array, out: U8Array, lo: int, hi: int) -> None:
    """f16 d = m / -8 with m the first element of the largest magnitude, 16 bytes of nibbles (`block_q4_0`, 18 B)."""
    for elements, packed in _chunks(x, out, lo, hi, 18):
        with np.errstate(all="ignore"):
            extreme = np.take_along_axis(elements, np.abs(elements).argmax(axis=1)[:, None], axis=1)
            # `+ 0` turns -0 into 0: a block of zeros has d = 0 / -8 = -0 whatever their signs.
            scale = (extreme + np.float32(0)) / np.float32(-8)
            quants = np.minimum(_whole(elements * _inverse(scale) + np.float32(8.5)), 15)
        packed[:, :2] = _half_bytes(scale)
        packed[:, 2:] = quants[:, :16] | (quants[:, 16:] << 4)


def quantize_fp8(x: F32Array, out: U8Array, lo: int, hi: int) -> None:
    """One e4m3fn byte an element: nearest even, beyond 448 saturated, every NaN 0x7f."""
    for elements, packed in _chunks(x, out, lo, hi, 32):
        bits = elements.view(np.uint32)
        size = bits & np.uint32(0x7FFFFFFF)
        with np.errstate(all="ignore"):
            normal = (size + ((size >> 20) & 1) + np.uint32(0x7FFFF) - np.uint32(120 << 23)) >> 20
            subnormal = (size.view(np.float32) + np.float32(2**14)).view(np.uint32) - np.uint32(0x46800000)
        code = np.where(size < 0x3C800000, subnormal, normal)
        code = np.where(size < 0x43E80000, code, np.uint32(126)) | ((bits >> 24) & 0x80)
        packed[:] = np.where(size > 0x7F800000, np.uint32(0x7F), code)


def dequantize_q8_0(packed: U8Array, at: int, out: F32Array, to: int, blocks: int) -> None:
    """`d * q`."""
    stored, values = _views(packed, at, 34, out, to, blocks)
    with np.errstate(all="ignore"):
        np.multiply(stored[:, 2:].view(np.int8), _halves(stored, 0), out=values, dtype=np.float32)


def dequantize_q5_1(packed: U8Array, at: int, out: F32Array, to: int, blocks: int) -> None:
    """`d * q + m`."""
    stored, values = _views(packed, at, 24, out, to, blocks)
    fifth = np.unpackbits(stored[:, 4:8], axis=1, bitorder="little")
    values[:] = _nibbles(stored[:, 8:]) | (fifth << 4)
    with np.errstate(all="ignore"):
        values *= _halves(stored, 0)
        values += _halves(stored, 2)


def dequantize_q4_0(packed: U8Array, at: int, out: F32Array, to: int, blocks: int) -> None:
    """`d * (q - 8)`."""
    stored, values = _views(packed, at, 18, out, to, blocks)
    values[:] = _nibbles(stored[:, 2:]).view(np.int8) - np.int8(8)
    with np.errstate(all="ignore"):
        values *= _halves(stored, 0)


def dequantize_fp8(packed: U8Array, at: int, out: F32Array, to: int, blocks: int) -> None:
    """The value of each e4m3fn byte."""
    stored, values = _views(packed, at, 32, out, to, blocks)
    np.take(_fp8_values(), stored, out=values)


def _chunks(x: F32Array, out: U8Array, lo: int, hi: int, block_bytes: int) -> list[tuple[F32Array, U8Array]]:
    elements, packed = x.reshape(-1, BLOCK), out.reshape(-1, block_bytes)
    starts = range(lo, hi, CHUNK)
    return [(elements[start : min(start + CHUNK, hi)], packed[start : min(start + CHUNK, hi)]) for start in starts]


def _views(packed: U8Array, at: int, block_bytes: int, out: F32Array, to: int, blocks: int) -> tuple[U8Array, F32Array]:
    """The stored blocks and the elements they become, a row a block."""
    stored = packed[at : at + blocks * block_bytes].reshape(blocks, block_bytes)
    return stored, out[to : to + blocks * BLOCK].reshape(blocks, BLOCK)


def _inverse(scale: F32Array) -> F32Array:
    return np.where(scale == 0, np.float32(0), np.float32(1) / scale)


def _whole(values: F32Array) -> NDArray[np.int32]:
    """Truncated to integers; what is not finite gives 0."""
    return np.where(np.isfinite(values), values, np.float32(0)).astype(np.int32)


def _half_bytes(column: F32Array) -> U8Array:
    """f32 `[blocks, 1]` as little-endian f16 bytes `[blocks, 2]`, every NaN as 0x7e00."""
    with np.errstate(all="ignore"):
        bits = column.astype("<f2").view("<u2")
    return np.where(np.isnan(column), np.uint16(0x7E00), bits).astype("<u2").view(np.uint8)


def _halves(stored: U8Array, at: int) -> F32Array:
    """The f16 at byte `at` of each block, as f32 `[blocks, 1]`."""
    return np.ascontiguousarray(stored[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(stored: U8Array) -> U8Array:
    return np.concatenate([stored & 15, stored >> 4], axis=1)


@lru_cache(maxsize=1)
def _fp8_values() -> F32Array:
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    size = np.where(code & 0x7F == 0x7F, np.nan, size)
    return np.where(code & 0x80, -size, size).astype(np.float32)
