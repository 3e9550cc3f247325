"""Row-wise f32 operations of a transformer layer. A row's bits depend on that row alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError
from ._arrays import F32Array, I64Array
from ._jit import kernel
from .scalars import f64_bits, f64_of_bits
from .simd import fma, load, splat, sum_lanes

LOG2_E, LN2 = math.log2(math.e), math.log(2)
ROUNDER = 1.5 * 2.0**52
"""Added and taken away again, it rounds an f64 below 2^51 to an integer."""
GELU_SLOPE, GELU_CUBIC = math.sqrt(2 / math.pi), 0.044715


def rms_norm(x: F32Array, weight: F32Array, eps: float, out: F32Array | None = None) -> F32Array:
    """`x / sqrt(mean(x^2) + eps) * weight` along the last axis of f32 `x [rows, width]`, `weight [width]`.

    Written to `out` (which may be `x`) if given, else to a new array.

    Raises:
        InputError: a shape, dtype or memory order is wrong.
    """
    if out is None:
        out = np.empty_like(x)
    _check("x", x, 2)
    _check("weight", weight, 1, x.shape[1:])
    _check("out", out, 2, x.shape)
    _rms_norm(x.reshape(-1), weight, np.float32(eps), out.reshape(-1))
    return out


def rope_tables(positions: NDArray[np.int64], inv_freq: F32Array) -> tuple[F32Array, F32Array]:
    """Cosines and sines, f32 `[len(positions), len(inv_freq)]` each, of the angles `f32(position) * inv_freq`.

    The angle is rounded to f32, as in Hugging Face's rotary embeddings; its cosine and sine are taken in f64, then
    rounded once.

    Raises:
        InputError: a shape, dtype or memory order is wrong.
    """
    _check("inv_freq", inv_freq, 1)
    if positions.ndim != 1 or positions.dtype != np.int64 or not positions.flags.c_contiguous:
        raise InputError(f"positions is {positions.dtype} {positions.shape}; it must be C-contiguous int64 [rows]")
    cos, sin = (np.empty((len(positions), len(inv_freq)), np.float32) for _ in range(2))
    _rope_tables(positions, inv_freq, cos, sin)
    return cos, sin


def rope_neox(x: F32Array, cos: F32Array, sin: F32Array) -> None:
    """Rotates, in place, the first d elements of each head of f32 `x [rows, heads, width]`; `cos`, `sin [rows, d / 2]`.

    Element `i` of the first half of d is paired with element `i` of the second (GPT-NeoX); the rest of the head stays.

    Raises:
        InputError: a shape, dtype or memory order is wrong, or d is more than the width.
    """
    _check("x", x, 3)
    _check("cos", cos, 2)
    _check("sin", sin, 2, cos.shape)
    if len(cos) != len(x) or 2 * cos.shape[1] > x.shape[2]:
        raise InputError(f"cos has shape {cos.shape}; x {x.shape} takes [{len(x)}, d / 2] with d at most {x.shape[2]}")
    _rope_neox(x, cos, sin)


def gelu_tanh_mul(gate: F32Array, up: F32Array) -> None:
    """`gate = gelu_tanh(gate) * up`, in place: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), f32 of equal shapes.

    Raises:
        InputError: a shape, dtype or memory order is wrong.
    """
    _check("gate", gate, gate.ndim)
    _check("up", up, gate.ndim, gate.shape)
    _gelu_tanh_mul(gate.reshape(-1), up.reshape(-1))


def silu_mul(gate: F32Array, up: F32Array) -> None:
    """`gate = gate * sigmoid(gate) * up`, in place, f32 of equal shapes.

    Raises:
        InputError: a shape, dtype or memory order is wrong.
    """
    _check("gate", gate, gate.ndim)
    _check("up", up, gate.ndim, gate.shape)
    _silu_mul(gate.reshape(-1), up.reshape(-1))


def sigmoid_mul(x: F32Array, gate: F32Array) -> None:
    """`x *= sigmoid(gate)`, in place, f32 of equal shapes; the sigmoid is computed in f64 and rounded once.

    Raises:
        InputError: a shape, dtype or memory order is wrong.
    """
    _check("x", x, x.ndim)
    _check("gate", gate, x.ndim, x.shape)
    _sigmoid_mul(x.reshape(-1), gate.reshape(-1))


def add_into(acc: F32Array, x: F32Array) -> None:
    """`acc += x`, f32 of equal shapes.

    Raises:
        InputError: a shape, dtype or memory order is wrong.
    """
    _check("acc", acc, acc.ndim)
    _check("x", x, acc.ndim, acc.shape)
    np.add(acc, x, out=acc)


def _check(name: str, array: NDArray[Any], ndim: int, shape: tuple[int, ...] | None = None) -> None:
    fits = array.ndim == ndim if shape is None else array.shape == shape
    if array.dtype != np.float32 or not fits or not array.flags.c_contiguous:
        wanted = f"of {ndim} dimensions" if shape is None else f"of shape {shape}"
        raise InputError(
            f"{name} is {array.dtype} {array.shape} with strides {array.strides};"
            f" it must be a C-contiguous float32 array {wanted}"
        )


@kernel
def _rms_norm(x: F32Array, weight: F32Array, eps: np.float32, out: F32Array) -> None:
    width = weight.size
    whole = width // 16 * 16
    for start in range(0, x.size, width):
        squares = splat(np.float32(0), 16)
        for at in range(start, start + whole, 16):
            values = load(x, at, 16)
            squares = fma(values, values, squares)
        total = sum_lanes(squares)
        for at in range(start + whole, start + width):
            total = fma(x[at], x[at], total)
        inverse = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for lane in range(width):
            out[start + lane] = x[start + lane] * inverse * weight[lane]


@kernel
def _rope_tables(positions: I64Array, inv_freq: F32Array, cos: F32Array, sin: F32Array) -> None:
    for row in range(len(positions)):
        for pair in range(len(inv_freq)):
            angle = np.float64(np.float32(positions[row]) * inv_freq[pair])
            cos[row, pair] = math.cos(angle)
            sin[row, pair] = math.sin(angle)


@kernel
def _rope_neox(x: F32Array, cos: F32Array, sin: F32Array) -> None:
    half = cos.shape[1]
    for row in range(x.shape[0]):
        for head in range(x.shape[1]):
            for pair in range(half):
                first, second = x[row, head, pair], x[row, head, half + pair]
                x[row, head, pair] = first * cos[row, pair] - second * sin[row, pair]
                x[row, head, half + pair] = second * cos[row, pair] + first * sin[row, pair]


@kernel
def _gelu_tanh_mul(gate: F32Array, up: F32Array) -> None:
    """0.5 (1 + tanh(u)) is sigmoid(2 u), which unlike the former loses nothing where tanh is near -1."""
    for at in range(gate.size):
        x = np.float64(gate[at])
        gate[at] = np.float32(x * sigmoid(2 * GELU_SLOPE * (x + GELU_CUBIC * x * x * x))) * up[at]


@kernel
def _silu_mul(gate: F32Array, up: F32Array) -> None:
    for at in range(gate.size):
        x = np.float64(gate[at])
        gate[at] = np.float32(x * sigmoid(x)) * up[at]


@kernel
def _sigmoid_mul(x: F32Array, gate: F32Array) -> None:
    for at in range(x.size):
        x[at] *= np.float32(sigmoid(np.float64(gate[at])))


@kernel
def sigmoid(x: float) -> float:
    """1 / (1 + e^-x) in f64, inside kernels."""
    return 1.0 / (1.0 + _exp(-x))


@kernel
def _exp(x: float) -> float:
    """e^x in f64 to 1e-9 of its value, clamped to |x| <= 700: exact enough to round to f32, and it vectorises.

    2^n * exp(r), n = round(x / ln 2), |r| <= ln 2 / 2, by the Taylor series to r^8.
    """
    x = min(max(x, -700.0), 700.0)
    shifted = x * LOG2_E + ROUNDER
    rest = x - (shifted - ROUNDER) * LN2
    power = 1 / 5040 + rest * (1 / 40320)
    power = 1 / 720 + rest * power
    power = 1 / 120 + rest * power
    power = 1 / 24 + rest * power
    power = 1 / 6 + rest * power
    power = 1 / 2 + rest * power
    power = 1.0 + rest * power
    power = 1.0 + rest * power
    value: float = f64_of_bits(f64_bits(power) + (f64_bits(shifted) << 52))
    return value
