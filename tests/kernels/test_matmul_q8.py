"""Products with q8_0 weights: the bits of the same products in f32."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.errors import InputError
from memra_pp.kernels.matmul import PackedMatrix, matmul
from memra_pp.kernels.matmul_q8 import Q8Matrix
from memra_pp.kernels.panels import Q8_0 as BLOCK
from memra_pp.kernels.threads import Threads

Q8_0 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(autouse=True, scope="module")
def even_small_work_is_shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memra_pp.kernels.matmul.SHARE", 1)
        yield


@pytest.fixture(scope="module")
def pools():
    with Threads(1) as one, Threads(2) as two:
        yield one, two


def random_blocks(n_out, n_in, seed=0):
    """Blocks with any i8 and any finite f16 scale: negative, zero and subnormal ones among them."""
    rng = np.random.default_rng(seed)
    scales = rng.integers(0, 0x7C00, (n_out, n_in // 32, 1), np.uint16) | rng.choice([0, 0x8000], (n_out, n_in // 32, 1))
    bytes_ = rng.integers(0, 256, (n_out, n_in // 32, 32), np.uint8)
    return np.concatenate([scales.astype("<u2").view(np.uint8), bytes_], axis=2).reshape(n_out, -1)


def random_rows(rows, n_in, seed=1):
    return np.random.default_rng(seed).standard_normal((rows, n_in), dtype=np.float32)


def plain(blocks):
    return gguf.quants.dequantize(blocks, Q8_0)


def assert_same_bits(ours, theirs):
    np.testing.assert_array_equal(ours.view(np.uint32), theirs.view(np.uint32))


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 40), st.integers(0, 1 << 32))
@settings(max_examples=60, deadline=None)
def test_bits_are_those_of_the_dequantised_weights(pools, n_out, blocks_a_row, rows, seed):
    blocks, x = random_blocks(n_out, blocks_a_row * 32, seed), random_rows(rows, blocks_a_row * 32, seed)
    expected = matmul(x, PackedMatrix.pack(plain(blocks), pools[0]), pools[0])
    for threads in pools:
        assert_same_bits(matmul(x, Q8Matrix.pack(blocks.view(BLOCK), threads), threads), expected)


def test_every_number_of_rows_gives_each_row_its_own_bits(pools):
    blocks, x = random_blocks(130, 640), random_rows(70, 640)
    matrix = Q8Matrix.pack(blocks.view(BLOCK), pools[1])
    alone = matmul(x, PackedMatrix.pack(plain(blocks), pools[0]), pools[0])
    for rows in range(1, 71):
        for threads in pools:
            assert_same_bits(matmul(x[:rows], matrix, threads), alone[:rows])


def test_a_scale_that_is_no_number_is_that_of_its_own_weights(pools):
    blocks = random_blocks(70, 64)
    for row, half in ((3, 0x7C00), (66, 0x7E00)):
        blocks[row, 34:36] = half & 255, half >> 8
    for rows in (1, 2, 4, 20):
        x = random_rows(rows, 64)
        y = matmul(x, Q8Matrix.pack(blocks.view(BLOCK), pools[0]), pools[0])
        assert np.isnan(y[:, 66]).all() and not np.isfinite(y[:, 3]).any()
        with np.errstate(invalid="ignore"):
            np.testing.assert_array_equal(y, matmul(x, PackedMatrix.pack(plain(blocks), pools[0]), pools[0]))


def test_panels_hold_what_the_blocks_hold_and_zeros(pools):
    blocks = random_blocks(70, 96)
    matrix = Q8Matrix.pack(blocks.view(BLOCK), pools[1])
    assert (matrix.n_out, matrix.n_in, matrix.nbytes) == (70, 96, 2 * 64 * 96 // 32 * 34)
    parts = blocks.reshape(70, 3, 34)
    rows, depth = np.arange(70)[:, None], np.arange(96)
    np.testing.assert_array_equal(matrix.panels[rows // 64, depth, rows % 64], parts[:, :, 2:].reshape(70, 96).view(np.int8))
    scales = matrix.scales[rows // 64, np.arange(3), rows % 64]
    np.testing.assert_array_equal(scales.view(np.uint16), parts[:, :, :2].copy().view("<u2")[:, :, 0])
    assert not matrix.panels[1, :, 6:].any() and not matrix.scales[1, :, 6:].any()
    assert matrix.panels.ctypes.data % 64 == 0 and matrix.scales.ctypes.data % 64 == 0


@pytest.mark.parametrize("step", [1, 7, 64, 100])
def test_filling_in_pieces_is_packing(pools, step):
    blocks = random_blocks(133, 96).view(BLOCK)
    whole, pieces = Q8Matrix.pack(blocks, pools[0]), Q8Matrix.empty(133, 96)
    for start in range(0, 133, step):
        pieces.fill(start, blocks[start : start + step], pools[1])
    np.testing.assert_array_equal(pieces.panels, whole.panels)
    np.testing.assert_array_equal(pieces.scales.view(np.uint16), whole.scales.view(np.uint16))


def test_what_are_no_blocks_is_refused(pools):
    blocks, matrix = random_blocks(5, 64).view(BLOCK), Q8Matrix.empty(6, 64)
    for bad, message in ((blocks[0], r"\(2,\)"), (blocks[:0], "at least 1"), (blocks[:, :0], "at least 1")):
        with pytest.raises(InputError, match=message):
            Q8Matrix.pack(bad, pools[0])
    for row0, bad, message in (
        (0, random_blocks(5, 64), r"uint8 \(5, 68\)"),
        (0, blocks[:, :1], r"\[rows, 2\]"),
        (2, blocks, r"\[2, 7\) are outside the matrix's \[0, 6\)"),
        (-1, blocks, r"\[-1, 4\)"),
    ):
        with pytest.raises(InputError, match=message):
            matrix.fill(row0, bad, pools[0])
    assert not matrix.panels.any() and not matrix.scales.any()


def test_rows_of_another_width_are_refused(pools):
    with pytest.raises(InputError, match=r"\[rows, 64\]"):
        matmul(random_rows(2, 32), Q8Matrix.pack(random_blocks(5, 64).view(BLOCK), pools[0]), pools[0])
