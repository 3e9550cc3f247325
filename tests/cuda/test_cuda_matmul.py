"""Matrix products in CUDA, executed on the CPU: the bits of `matmul`, whatever the rows, the launch and the threads' order."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.kernels.cuda.matrix import KINDS
from memra_pp.kernels.matmul import PackedMatrix, matmul
from memra_pp.kernels.matmul_q8 import Q8Matrix
from memra_pp.kernels.panels import Q8_0
from memra_pp.kernels.threads import Threads

ORDERS = [0, 1, 2]
TILES = "tiles"


@pytest.fixture(scope="module")
def threads():
    return Threads(1)


def normal(*shape, seed=0, scale=1.0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32) * np.float32(scale)


def f32_matrix(n_out, n_in, threads):
    return PackedMatrix.pack(normal(n_out, n_in, seed=1), threads)


def bf16_matrix(n_out, n_in, threads):
    return PackedMatrix.pack((normal(n_out, n_in, seed=1).view(np.uint32) >> 16).astype(np.uint16), threads)


def q8_matrix(n_out, n_in, threads):
    random = np.random.default_rng(2)
    blocks = np.empty((n_out, n_in // 32), Q8_0)
    blocks["d"] = random.standard_normal(blocks.shape) * random.choice([0.01, 1e-6, 0, 300], blocks.shape)
    blocks["q"] = random.integers(-128, 128, (*blocks.shape, 32))
    return Q8Matrix.pack(blocks, threads)


def multiply(kernels, x, matrix, variant, order, quads=16):
    """`x @ w.T` by the variant of so many rows a block, or by that of tiles."""
    operands = [operand for operand in matrix.operands if operand is not None]
    count, depth = matrix.panels.shape[:2]
    out = np.full((len(x), matrix.n_out), np.nan, np.float32)
    numbers = np.int64(len(x)), np.int32(matrix.n_in)
    args = [x, *numbers, *operands, np.int32(depth), out, np.int32(matrix.n_out)]
    if variant == TILES:
        grid, block, shared = (-(-len(x) // 64), count), (16, 8), 17408
    else:
        slots = (128 if variant == 8 else 256) // quads
        grid, block = (-(-len(x) // variant), count * 16 // quads), (quads, slots)
        shared = 4 * variant * slots * (32 + 4 * quads)
    kind = KINDS[matrix.panels.dtype]
    kernels.launch(f"matmul_{kind}_{variant}", grid, block, args, shared, order)
    return out


def assert_same_bits(found, wanted):
    np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


@pytest.mark.parametrize("variant", [1, 2, 4, 8, TILES])
@pytest.mark.parametrize(
    "make, n_in",
    [(f32_matrix, n) for n in (1, 31, 40, 555, 640)]
    + [(bf16_matrix, n) for n in (31, 555)]
    + [(q8_matrix, n) for n in (32, 160, 576)],
)
def test_variants(kernels, threads, variant, make, n_in):
    matrix = make(130, n_in, threads)
    for rows, order in zip((1, 9, 7), ORDERS, strict=True):
        x = normal(rows, n_in)
        assert_same_bits(multiply(kernels, x, matrix, variant, order), matmul(x, matrix, threads))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", [f32_matrix, bf16_matrix, q8_matrix])
def test_any_share_of_a_panel(kernels, threads, make, order):
    matrix, x = make(70, 352, threads), normal(3, 352)
    for variant, quads in ((1, 8), (1, 4), (2, 4), (8, 8), (8, 4)):
        assert_same_bits(multiply(kernels, x, matrix, variant, order, quads), matmul(x, matrix, threads))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", [f32_matrix, bf16_matrix, q8_matrix])
def test_several_tiles(kernels, threads, make, order):
    matrix, x = make(65, 96, threads), normal(131, 96)
    assert_same_bits(multiply(kernels, x, matrix, TILES, order), matmul(x, matrix, threads))


@pytest.mark.parametrize("variant", [1, 8, TILES])
@pytest.mark.parametrize("n_out", [1, 2, 3, 64])
def test_outputs_of_a_part_of_a_quad(kernels, threads, variant, n_out):
    matrix, x = f32_matrix(n_out, 70, threads), normal(2, 70)
    assert_same_bits(multiply(kernels, x, matrix, variant, 0), matmul(x, matrix, threads))


@pytest.mark.parametrize("variant", [1, 8, TILES])
@pytest.mark.parametrize("scale", [0, 1e-30, 1e-22, 1e15])
def test_extreme_values(kernels, threads, variant, scale):
    """Products that vanish leave zeros of either sign, which padding must not change."""
    w = normal(66, 37, seed=1, scale=scale) * np.resize([-1, 1], (66, 1)).astype(np.float32)
    matrix, x = PackedMatrix.pack(np.abs(w) * np.sign(w[:, :1]), threads), np.abs(normal(2, 37, scale=scale))
    wanted = matmul(x, matrix, threads)
    assert scale != 1e-30 or (np.signbit(wanted).any() and not wanted.any())
    assert_same_bits(multiply(kernels, x, matrix, variant, 0), wanted)
