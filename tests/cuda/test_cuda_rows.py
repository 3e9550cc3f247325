"""Row-wise CUDA kernels, executed on the CPU: the bits of the CPU's own, in any order of threads."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.kernels import ops
from memra_pp.kernels.attention import AttentionSpec
from memra_pp.kernels.heads import split_heads

EPS = np.float32(1e-6)

pytestmark = pytest.mark.parametrize("order", [0, 1, 2])


def normal(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(scale)


def extremes(count):
    """Signed values of every size, zeros of both signs among them."""
    sizes = np.array([0, 1e-45, 1e-38, 1e-20, 1e-3, 0.5, 1, 3, 10, 40, 88, 700, 800, 1e5, 1e30, 3e38], np.float32)
    values = np.resize(np.stack([sizes, -sizes], axis=1).reshape(-1), count)
    return np.where(np.arange(count) < 2 * len(sizes), values, normal(count, scale=4)).astype(np.float32)


def assert_same_bits(found, wanted):
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def norm_block(width, rows_a_block):
    """The block of an RMS norm, and its shared memory."""
    return dict(block=(32, rows_a_block) if rows_a_block > 1 else (128, 1), shared=4 * rows_a_block * (width + 1))


@pytest.mark.parametrize("rows_a_block", [1, 3])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("width", [1, 15, 16, 100, 256, 645])
def test_rms_norm(kernels, order, width, rows, rows_a_block):
    x, weight, acc = normal(rows, width), normal(width, seed=1), normal(rows, width, seed=2)
    wanted, out, in_place = ops.rms_norm(x, weight, float(EPS)), np.empty_like(x), x.copy()
    grid, numbers = -(-rows // rows_a_block), (np.int64(rows), np.int32(width))
    launch = norm_block(width, rows_a_block)
    for to in (out, in_place):
        kernels.launch("rms_norm", grid, args=[x if to is out else to, weight, EPS, to, *numbers], order=order, **launch)
        assert_same_bits(to, wanted)
    kernels.launch("add_rms_norm", grid, args=[x, weight, EPS, acc, *numbers], order=order, **launch)
    assert_same_bits(acc, normal(rows, width, seed=2) + wanted)


@pytest.mark.parametrize("scale", [0, 1e-30, 1e-42, 1e18, 1e30])
def test_rms_norm_of_extreme_rows(kernels, order, scale):
    x, weight = normal(3, 70, scale=scale), normal(70, seed=1)
    out = np.empty_like(x)
    kernels.launch("rms_norm", 3, args=[x, weight, EPS, out, np.int64(3), np.int32(70)], order=order, **norm_block(70, 1))
    assert_same_bits(out, ops.rms_norm(x, weight, float(EPS)))


def test_rope_tables(kernels, order):
    positions = np.array([0, 1, 2, 511, 4096, 131071, 16_777_217, 1 << 40], np.int64)
    inv_freq = np.float32(1) / np.power(np.float32(1e4), np.arange(37, dtype=np.float32) / np.float32(37))
    cos, sin = (np.empty((len(positions), len(inv_freq)), np.float32) for _ in range(2))
    args = [positions, inv_freq, cos, sin, np.int64(len(positions)), np.int32(len(inv_freq))]
    kernels.launch("rope_tables", -(-cos.size // 256), 256, args, order=order)
    for found, wanted in zip((cos, sin), ops.rope_tables(positions, inv_freq), strict=True):
        # The C library's f64 cosine is not CUDA's: either may be rounded to the f32 next to the other's.
        np.testing.assert_array_max_ulp(found, wanted, maxulp=1)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    "n_head, n_head_kv, dim_k, dim_v, pairs", [(4, 1, 256, 256, 128), (6, 2, 64, 32, 20), (3, 3, 32, 96, 3)]
)
def test_split_heads(kernels, order, rows, n_head, n_head_kv, dim_k, dim_v, pairs):
    spec = AttentionSpec(n_head_kv, dim_k, dim_v, None, 1.0)
    qkv = normal(rows, (n_head + n_head_kv) * dim_k + n_head_kv * dim_v)
    q_norm, k_norm = normal(dim_k, seed=1), normal(dim_k, seed=2)
    rope = ops.rope_tables(np.arange(7, 7 + rows), np.linspace(1, 0.01, pairs, dtype=np.float32))
    wanted = split_heads(qkv, spec, q_norm, k_norm, float(EPS), rope)
    found = [np.full_like(array, np.nan) for array in wanted]
    shape = [np.int32(size) for size in (n_head, n_head_kv, dim_k, dim_v, pairs)]
    args = [qkv, q_norm, k_norm, EPS, *rope, *found, np.int64(rows), *shape]
    kernels.launch("split_heads", -(-rows * (n_head + 2 * n_head_kv) // 8), 256, args, order=order)
    for array, bits in zip(found, wanted, strict=True):
        assert_same_bits(array, bits)


@pytest.mark.parametrize("name", ["gelu_tanh_mul", "silu_mul", "sigmoid_mul", "add_into"])
@pytest.mark.parametrize("count", [1, 600])
def test_elementwise(kernels, order, name, count):
    left, right = extremes(count), normal(count, seed=1)
    if name == "sigmoid_mul":
        left, right = right, left
    wanted = left.copy()
    getattr(ops, name)(wanted, right)
    kernels.launch(name, -(-count // 256), 256, [left, right, np.int64(count)], order=order)
    assert_same_bits(left, wanted)


def test_soft_cap(kernels, order):
    x, cap = extremes(600), np.float32(30)
    wanted = np.tanh(x / cap) * cap
    kernels.launch("soft_cap", 3, 256, [x, cap, np.int64(600)], order=order)
    np.testing.assert_array_max_ulp(x, wanted, maxulp=2)


def test_gather_rows(kernels, order):
    x, rows = normal(9, 45), np.array([8, 0, 3, 3, 7, 1, 2], np.int64)
    out = np.empty((len(rows), 45), np.float32)
    kernels.launch("gather_rows", -(-out.size // 256), 256, [x, rows, out, np.int64(len(rows)), np.int32(45)], order=order)
    assert_same_bits(out, x[rows])
