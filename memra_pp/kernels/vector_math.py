"""Functions of f32 vectors that need more than an instruction."""

from __future__ import annotations

import numpy as np

from ._jit import Lanes, kernel
from .simd import as_bits, fma, from_bits, matches, splat, where

MAGNITUDE = np.int32(0x7FFFFFFF)
INFINITY = np.int32(0x7F800000)
CUTOFF = np.int32(np.float32(87.0).view(np.int32))
"""Bits of 87: exp(-87) is the last that is safely a normal f32."""
LOG2_E = np.float32(1.4426950408889634)
LN2_HIGH = np.float32(0.693145751953125)
LN2_LOW = np.float32(1.4286068203094172e-06)
"""ln 2 in two parts; the first has few enough bits that its multiples are exact."""
ROUNDER = np.float32(1.5 * 2**23)
"""Added and taken away again, it rounds an f32 below 2^22 to an integer."""


@kernel
def exp_of_negative(values: Lanes) -> Lanes:
    """e to the power of f32 `values <= 0`, to 2 units in the last place; 0 below -87, NaN for NaN.

    exp(x) = 2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2, the latter by its Taylor series to r^7.
    """
    size = as_bits(values) & MAGNITUDE
    shifted = fma(LOG2_E, values, splat(ROUNDER, 16))
    exponent = as_bits(shifted) - as_bits(splat(ROUNDER, 16))
    whole = shifted - ROUNDER
    rest = fma(-LN2_LOW, whole, fma(-LN2_HIGH, whole, values))
    power = fma(np.float32(1 / 5040), rest, splat(np.float32(1 / 720), 16))
    power = fma(rest, power, splat(np.float32(1 / 120), 16))
    power = fma(rest, power, splat(np.float32(1 / 24), 16))
    power = fma(rest, power, splat(np.float32(1 / 6), 16))
    power = fma(rest, power, splat(np.float32(1 / 2), 16))
    power = fma(rest, power, splat(np.float32(1), 16))
    power = fma(rest, power, splat(np.float32(1), 16))
    power = from_bits(as_bits(power) + (exponent << 23))
    beyond = where(matches(size, ">", INFINITY), values, np.float32(0))
    return where(matches(size, ">", CUTOFF), beyond, power)
