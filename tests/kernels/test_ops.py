"""Row-wise operations: accurate, and a row's bits do not depend on the rows beside it."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.errors import InputError
from memra_pp.kernels import ops


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("width", [1, 16, 40, 640, 5120])
def test_rms_norm(width):
    x, weight = normal(9, width) * 3, normal(width, seed=1)
    exact = x.astype(np.float64)
    exact = exact / np.sqrt((exact**2).mean(axis=1, keepdims=True) + 1e-6) * weight
    result = ops.rms_norm(x, weight, 1e-6)
    np.testing.assert_allclose(result, exact, rtol=1e-6)
    for row in range(9):
        np.testing.assert_array_equal(ops.rms_norm(x[row : row + 1], weight, 1e-6)[0], result[row])
    assert ops.rms_norm(x, weight, 1e-6, out=x) is x
    np.testing.assert_array_equal(x, result)


def test_rope_tables_round_the_angle_to_f32_and_the_rest_once():
    inv_freq = (1e6 ** -(np.arange(32) / 32)).astype(np.float32)
    positions = np.array([0, 1, 511, 4097, 131071])
    cos, sin = ops.rope_tables(positions, inv_freq)
    angles = (positions.astype(np.float32)[:, None] * inv_freq).astype(np.float64)
    np.testing.assert_array_equal(cos, np.cos(angles).astype(np.float32))
    np.testing.assert_array_equal(sin, np.sin(angles).astype(np.float32))
    alone = ops.rope_tables(positions[3:4], inv_freq)
    np.testing.assert_array_equal(alone[0][0], cos[3])
    np.testing.assert_array_equal(alone[1][0], sin[3])


@pytest.mark.parametrize("rotated", [64, 40, 2])
def test_rope_pairs_halves_and_leaves_the_rest(rotated):
    x, half = normal(5, 3, 64), rotated // 2
    cos, sin = ops.rope_tables(np.arange(5), normal(half, seed=2) ** 2)
    first, second = x[..., :half].copy(), x[..., half:rotated].copy()
    rest = x[..., rotated:].copy()
    ops.rope_neox(x, cos, sin)
    np.testing.assert_array_equal(x[..., :half], first * cos[:, None] - second * sin[:, None])
    np.testing.assert_array_equal(x[..., half:rotated], second * cos[:, None] + first * sin[:, None])
    np.testing.assert_array_equal(x[..., rotated:], rest)


def gelu(x):
    return x / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + np.exp(-x))


@pytest.mark.parametrize(("operation", "exact"), [(ops.gelu_tanh_mul, gelu), (ops.silu_mul, silu)])
def test_gates_are_accurate_to_the_last_place(operation, exact):
    x = np.concatenate([np.linspace(-80, 80, 100001), np.geomspace(1e-30, 1e30, 1001)]).astype(np.float32)
    gate = x.copy()
    operation(gate, np.ones_like(x))
    with np.errstate(over="ignore"):
        expected = exact(x.astype(np.float64))
    np.testing.assert_allclose(gate, expected, rtol=1e-7, atol=1e-37)


@pytest.mark.parametrize("operation", [ops.gelu_tanh_mul, ops.silu_mul])
def test_gates_multiply_and_keep_a_rows_bits(operation):
    gate, up = normal(7, 37), normal(7, 37, seed=1)
    whole, activated = gate.copy(), gate.copy()
    operation(whole, up)
    operation(activated, np.ones_like(up))
    np.testing.assert_array_equal(whole, activated * up)
    for row in range(7):
        alone = gate[row].copy()
        operation(alone, up[row])
        np.testing.assert_array_equal(alone, whole[row])


def test_sigmoid_mul():
    x, gate = normal(9, 37), normal(9, 37, seed=1) * 30
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    got = x.copy()
    ops.sigmoid_mul(got, gate)
    np.testing.assert_allclose(got, x * sigmoid.astype(np.float32), rtol=2e-7)
    for row in range(9):
        alone = x[row].copy()
        ops.sigmoid_mul(alone, gate[row])
        np.testing.assert_array_equal(alone, got[row])


@pytest.mark.parametrize("operation", [ops.gelu_tanh_mul, ops.silu_mul])
def test_gates_at_the_ends(operation):
    gate = np.array([0.0, -0.0, np.inf, 3e38, -3e38, np.nan], np.float32)
    operation(gate, np.ones(6, np.float32))
    np.testing.assert_array_equal(gate, np.array([0, 0, np.inf, 3e38, 0, np.nan], np.float32))


def test_add_in_place():
    acc, x = normal(3, 8), normal(3, 8, seed=1)
    expected = acc + x
    ops.add_into(acc, x)
    np.testing.assert_array_equal(acc, expected)


@pytest.mark.parametrize(
    "call",
    [
        lambda: ops.rms_norm(np.zeros((2, 8)), np.zeros(8, np.float32), 1e-6),
        lambda: ops.rms_norm(np.zeros((2, 8), np.float32), np.zeros(7, np.float32), 1e-6),
        lambda: ops.rope_neox(np.zeros((2, 1, 8), np.float32), *np.zeros((2, 2, 5), np.float32)),
        lambda: ops.rope_neox(np.zeros((2, 1, 8), np.float32), *np.zeros((2, 3, 4), np.float32)),
        lambda: ops.rope_tables(np.zeros(2), np.zeros(4, np.float32)),
        lambda: ops.gelu_tanh_mul(np.zeros((2, 8), np.float32), np.zeros((2, 9), np.float32)),
        lambda: ops.silu_mul(np.zeros((2, 8), np.float32)[:, ::2], np.zeros((2, 4), np.float32)),
        lambda: ops.sigmoid_mul(np.zeros((2, 8), np.float32), np.zeros((2, 9), np.float32)),
        lambda: ops.sigmoid_mul(np.zeros((2, 8), np.float32)[:, ::2], np.zeros((2, 4), np.float32)),
        lambda: ops.add_into(np.zeros(3, np.float32), np.zeros(4, np.float32)),
    ],
)
def test_bad_arguments_are_refused(call):
    with pytest.raises(InputError, match=r"must be|takes"):
        call()
