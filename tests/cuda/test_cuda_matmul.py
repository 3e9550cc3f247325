"""Matrix products in CUDA, executed on the CPU: the bits of `matmul`, whatever the rows, the launch and the threads' order."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.errors import InputError
from memra_pp.kernels.cuda.matrix import KINDS
from memra_pp.kernels.cuda.matrix import pack as pack_on_gpu
from memra_pp.kernels.matmul import PackedMatrix, matmul, pack
from memra_pp.kernels.matmul_q8 import Q8Matrix
from memra_pp.kernels.panels import PLAIN, Q8_0
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


def stored(form):
    """Weights `[200, 96]` in a form that a backend packs."""
    if form != Q8_0:
        return normal(200, 96).astype(form) if form == np.float32 else (normal(200, 96).view(np.uint32) >> 16).astype(form)
    blocks = np.empty((200, 3), Q8_0)
    blocks["d"], blocks["q"] = normal(200, 3), np.random.default_rng(0).integers(-128, 128, (200, 3, 32))
    return blocks


@pytest.mark.parametrize("form", [*PLAIN, Q8_0], ids=["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("rows", [1, 63, 64, 150, 200])
def test_a_gpu_packs_pieces_as_the_cpu_does(gpu, threads, form, rows):
    weights = stored(form)
    ours = pack_on_gpu(gpu, 200, 96, (weights[at : at + rows] for at in range(0, 200, rows)))
    wanted = pack(200, 96, [weights], threads)
    np.testing.assert_array_equal(gpu.download(ours.panels), wanted.panels)
    if form == Q8_0:
        np.testing.assert_array_equal(gpu.download(ours.scales).view(np.uint16), wanted.scales.view(np.uint16))
    assert ours.nbytes == wanted.nbytes


def test_a_gpu_packs_whole_matrices_of_one_form(gpu):
    f32, bf16, q8 = (stored(form) for form in (*PLAIN, Q8_0))
    for n_in, parts, message in (
        (96, [], "0 rows"),
        (96, [f32[:199]], "199 rows"),
        (96, [f32, f32[:1]], "201 rows"),
        (95, [f32], r"\(200, 96\).*\[rows, 95\]"),
        (96, [f32[:100], bf16[100:]], "uint16"),
        (97, [q8], "97 inputs"),
        (96, [f32.astype(np.int8)], "int8"),
        (96, [f32[0]], r"\(96,\)"),
    ):
        with pytest.raises(InputError, match=message):
            pack_on_gpu(gpu, 200, n_in, parts)


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
