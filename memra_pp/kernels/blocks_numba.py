"""The block formats of the K/V cache, compiled: blocks of 32 elements, packed and read back.

Layouts and rounding are those of ggml's reference quantisers (`quantize_row_*_ref` in ggml-quants.c) and, for fp8, of
the OCP e4m3fn format with saturation. A NaN makes its whole block read back as NaN in q8_0, q5_1 and q4_0. Where the
arithmetic of a block yields an element that no integer holds (an infinity; a scale so small that its inverse is
infinite) the stored element is 0, as on x86.

A quantiser packs blocks `[lo, hi)` of a contiguous row of blocks. A dequantiser reads `blocks` blocks from byte `at`
on and writes their elements from element `to` on: its caller may stand anywhere inside a plane.
"""

from __future__ import annotations

import numpy as np

from ._arrays import F32Array, U8Array
from ._jit import Lanes, kernel
from .scalars import f32_of_bits, load_half, load_word, lowest_set, store_half, store_word
from .simd import (
    as_bits,
    from_bits,
    larger,
    load,
    load_bytes,
    load_signed_bytes,
    matches,
    max_lanes,
    min_lanes,
    smaller,
    splat,
    store,
    store_bytes,
    to_f32,
    to_i32,
    where,
)

MAGNITUDE = np.int32(0x7FFFFFFF)
SIGN = np.int32(-0x80000000)
INFINITY = np.int32(0x7F800000)
LARGEST = np.float32(np.finfo(np.float32).max)
BELOW_HALF = np.float32(0.49999997)
"""The f32 under one half: `trunc(x + copysign(BELOW_HALF, x))` rounds half away from zero."""


@kernel
def _inverse(scale: np.float32) -> np.float32:
    return np.float32(0) if scale == 0 else np.float32(1) / scale


@kernel
def _whole(values: Lanes) -> Lanes:
    """Truncated to integers; what is not finite gives 0."""
    finite = matches(as_bits(values) & MAGNITUDE, "<", INFINITY)
    return to_i32(where(finite, values, np.float32(0)))


@kernel
def quantize_q8_0(x: F32Array, out: U8Array, lo: int, hi: int) -> None:
    """f16 d = amax / 127, then 32 i8 rounded half away from zero (`block_q8_0`, 34 bytes)."""
    for block in range(lo, hi):
        at, to = block * 32, block * 34
        first, second = load(x, at, 16), load(x, at + 16, 16)
        largest = max_lanes(larger(as_bits(first) & MAGNITUDE, as_bits(second) & MAGNITUDE))
        scale = f32_of_bits(largest) / np.float32(127)
        inverse = _inverse(scale)
        store_half(out, to, scale)
        store_bytes(out, to + 2, _rounded(first * inverse))
        store_bytes(out, to + 18, _rounded(second * inverse))


@kernel
def _rounded(values: Lanes) -> Lanes:
    return _whole(values + from_bits(as_bits(splat(BELOW_HALF, 16)) | (as_bits(values) & SIGN)))


@kernel
def quantize_q5_1(x: F32Array, out: U8Array, lo: int, hi: int) -> None:
    """f16 d = (max - min) / 31, f16 min, a u32 of fifth bits, 16 bytes of nibbles (`block_q5_1`, 24 bytes)."""
    half, below, above = np.float32(0.5), splat(LARGEST, 16), splat(-LARGEST, 16)
    for block in range(lo, hi):
        at, to = block * 32, block * 24
        first, second = load(x, at, 16), load(x, at + 16, 16)
        bottom = min_lanes(smaller(first, smaller(second, below)))
        top = max_lanes(larger(first, larger(second, above)))
        if bottom == 0:
            bottom = _first_zero(first, second)
        scale = np.float32(0) if top == bottom else (top - bottom) / np.float32(31)
        if _has_nan(first) or _has_nan(second):
            scale = bottom = np.float32(np.nan)
        inverse = _inverse(scale)
        low, high = _whole((first - bottom) * inverse + half), _whole((second - bottom) * inverse + half)
        store_half(out, to, scale)
        store_half(out, to + 2, bottom)
        store_word(out, to + 4, matches(low & 16, "!=", 0) | (matches(high & 16, "!=", 0) << np.uint32(16)))
        store_bytes(out, to + 8, (low & 15) | (high << 4))


@kernel
def _has_nan(values: Lanes) -> bool:
    return bool(matches(as_bits(values) & MAGNITUDE, ">", INFINITY) != 0)


@kernel
def _first_zero(first: Lanes, second: Lanes) -> np.float32:
    """The first element that is 0 or -0: of two equal minima the reference keeps the earlier one, sign and all."""
    zeros = matches(as_bits(first) & MAGNITUDE, "==", 0) | (matches(as_bits(second) & MAGNITUDE, "==", 0) << np.uint32(16))
    signs = matches(as_bits(first), "<", 0) | (matches(as_bits(second), "<", 0) << np.uint32(16))
    negative = (signs >> np.uint32(lowest_set(zeros))) & np.uint32(1)
    return np.float32(-0.0) if negative else np.float32(0.0)


@kernel
def quantize_q4_0(x: F32Array, out: U8Array, lo: int, hi: int) -> None:
    """f16 d = m / -8 with m the first element of the largest magnitude, 16 bytes of nibbles (`block_q4_0`, 18 B)."""
    offset = np.float32(8.5)
    for block in range(lo, hi):
        at, to = block * 32, block * 18
        first, second = load(x, at, 16), load(x, at + 16, 16)
        first_size, second_size = as_bits(first) & MAGNITUDE, as_bits(second) & MAGNITUDE
        largest = max_lanes(larger(first_size, second_size))
        hits = matches(first_size, "==", largest) | (matches(second_size, "==", largest) << np.uint32(16))
        extreme = x[at + lowest_set(hits)] if largest != 0 else np.float32(0)
        scale = extreme / np.float32(-8)
        inverse = _inverse(scale)
        low, high = _whole(first * inverse + offset), _whole(second * inverse + offset)
        store_half(out, to, scale)
        store_bytes(out, to + 2, _at_most_15(low) | (_at_most_15(high) << 4))


@kernel
def _at_most_15(values: Lanes) -> Lanes:
    return where(matches(values, "<", 15), values, np.int32(15))


@kernel
def quantize_fp8(x: F32Array, out: U8Array, lo: int, hi: int) -> None:
    """One e4m3fn byte an element: nearest even, beyond 448 saturated, every NaN 0x7f."""
    for at in range(lo * 32, hi * 32, 16):
        bits = as_bits(load(x, at, 16))
        size = bits & MAGNITUDE
        # Rebias the exponent from 127 to 7 and round the mantissa from 23 bits to 3, half to even.
        normal = (size + ((size >> 20) & 1) + np.int32(0x7FFFF - (120 << 23))) >> 20
        # Below 2^-6 the step is 2^-9: that of f32 at 2^14, so one addition rounds.
        subnormal = as_bits(from_bits(size) + np.float32(2**14)) - np.int32(0x46800000)
        code = where(matches(size, "<", np.int32(0x3C800000)), subnormal, normal)
        code = where(matches(size, "<", np.int32(0x43E80000)), code, np.int32(126)) | ((bits >> 24) & 0x80)
        store_bytes(out, at, where(matches(size, ">", INFINITY), np.int32(0x7F), code))


@kernel
def quantize_f32(x: F32Array, out: U8Array, lo: int, hi: int) -> None:
    """The bytes of each f32, as they are."""
    for at in range(lo * 32, hi * 32, 16):
        store(out, at * 4, load(x, at, 16))


@kernel
def dequantize_q8_0(packed: U8Array, at: int, out: F32Array, to: int, blocks: int) -> None:
    """`d * q`."""
    for _ in range(blocks):
        scale = load_half(packed, at)
        store(out, to, to_f32(load_signed_bytes(packed, at + 2)) * scale)
        store(out, to + 16, to_f32(load_signed_bytes(packed, at + 18)) * scale)
        at, to = at + 34, to + 32


@kernel
def dequantize_q5_1(packed: U8Array, at: int, out: F32Array, to: int, blocks: int) -> None:
    """`d * q + m`."""
    for _ in range(blocks):
        scale, bottom = load_half(packed, at), load_half(packed, at + 2)
        fifth, nibbles = load_word(packed, at + 4), load_bytes(packed, at + 8)
        low, high = nibbles & 15, nibbles >> 4
        store(out, to, to_f32(where(fifth, low | 16, low)) * scale + bottom)
        store(out, to + 16, to_f32(where(fifth >> np.uint32(16), high | 16, high)) * scale + bottom)
        at, to = at + 24, to + 32


@kernel
def dequantize_q4_0(packed: U8Array, at: int, out: F32Array, to: int, blocks: int) -> None:
    """`d * (q - 8)`."""
    for _ in range(blocks):
        scale, nibbles = load_half(packed, at), load_bytes(packed, at + 2)
        store(out, to, to_f32((nibbles & 15) - 8) * scale)
        store(out, to + 16, to_f32((nibbles >> 4) - 8) * scale)
        at, to = at + 18, to + 32


@kernel
def dequantize_fp8(packed: U8Array, at: int, out: F32Array, to: int, blocks: int) -> None:
    """The value of each e4m3fn byte."""
    for step in range(0, blocks * 32, 16):
        code = load_bytes(packed, at + step)
        size = code & 0x7F
        eighth = np.float32(0.125)
        # A subnormal is m / 8 * 2^-6; a normal one needs only its exponent moved from bias 7 to 127.
        tiny = as_bits(to_f32(size) * (eighth * np.float32(2**-6)))
        value = where(matches(size, "<", 8), tiny, (size << 20) + np.int32(120 << 23))
        value = where(matches(size, "==", 0x7F), np.int32(0x7FC00000), value)
        store(out, to + step, from_bits(value | ((code & 0x80) << 24)))


@kernel
def dequantize_f32(packed: U8Array, at: int, out: F32Array, to: int, blocks: int) -> None:
    """The bytes of each f32, as they are."""
    for step in range(0, blocks * 32, 16):
        store(out, to + step, load(packed, at + step * 4, 16))
