"""Matrix products: right, and the same bits however rows are grouped and work is shared."""

from __future__ import annotations

import numpy as np
import pytest

from memra_pp.errors import InputError
from memra_pp.kernels.matmul import PackedMatrix, matmul, pack
from memra_pp.kernels.threads import Threads


@pytest.fixture(autouse=True, scope="module")
def even_small_work_is_shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memra_pp.kernels.matmul.SHARE", 1)
        yield


@pytest.fixture(scope="module")
def pools():
    with Threads(1) as one, Threads(2) as two:
        yield one, two


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize(("n_out", "n_in"), [(200, 77), (64, 8), (1, 1), (130, 300), (65, 129)])
def test_every_number_of_rows_gives_each_row_its_own_bits(pools, n_out, n_in):
    w, x = normal(n_out, n_in), normal(70, n_in, seed=1)
    packed = PackedMatrix.pack(w, pools[0])
    alone = np.concatenate([matmul(x[row : row + 1], packed, pools[0]) for row in range(70)])
    exact = x.astype(np.float64) @ w.T.astype(np.float64)
    assert np.abs(alone - exact).max() < 1e-6 * n_in
    for rows in range(1, 71):
        for threads in pools:
            np.testing.assert_array_equal(matmul(x[:rows], packed, threads), alone[:rows])


def bf16(w):
    return (w.view(np.uint32) >> 16).astype(np.uint16)


def f32(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize(("n_out", "n_in"), [(200, 77), (64, 8), (1, 1), (65, 129)])
def test_bf16_gives_the_bits_of_its_f32(pools, n_out, n_in):
    bits, x = bf16(normal(n_out, n_in)), normal(70, n_in, seed=1)
    plain, packed = PackedMatrix.pack(f32(bits), pools[0]), PackedMatrix.pack(bits, pools[1])
    assert packed.nbytes * 2 == plain.nbytes
    for rows in range(1, 71):
        for threads in pools:
            found, wanted = matmul(x[:rows], packed, threads), matmul(x[:rows], plain, threads)
            np.testing.assert_array_equal(found.view(np.uint32), wanted.view(np.uint32))


def test_bf16_of_any_bits(pools):
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(256, 256)
    x = np.eye(256, dtype=np.float32)[[5]]
    with np.errstate(invalid="ignore"):
        for rows in (1, 2, 4, 6, 60):
            batch = np.repeat(x, rows, axis=0)
            found = matmul(batch, PackedMatrix.pack(bits, pools[0]), pools[0])
            np.testing.assert_array_equal(found, matmul(batch, PackedMatrix.pack(f32(bits), pools[0]), pools[0]))


def test_sums_run_over_k_from_first_to_last(pools):
    x = np.array([[2.0**24, 1.0, -(2.0**24)]], np.float32)
    packed = PackedMatrix.pack(np.ones((3, 3), np.float32), pools[0])
    assert matmul(x, packed, pools[0]).tolist() == [[0.0, 0.0, 0.0]]
    assert matmul(x[:, [0, 2, 1]].copy(), packed, pools[0]).tolist() == [[1.0, 1.0, 1.0]]


@pytest.mark.parametrize("step", [1, 7, 64, 100, 333])
@pytest.mark.parametrize("form", [np.asarray, bf16])
def test_filling_in_pieces_is_packing(pools, step, form):
    w = form(normal(333, 45))
    whole, pieces = PackedMatrix.pack(w, pools[0]), PackedMatrix.empty(333, 45, w.dtype)
    for start in range(0, 333, step):
        pieces.fill(start, w[start : start + step], pools[1])
    np.testing.assert_array_equal(pieces.panels, whole.panels)
    rows, depth = np.divmod(np.arange(333), 64)[0], np.arange(45)
    np.testing.assert_array_equal(whole.panels[rows[:, None], depth, (np.arange(333) % 64)[:, None]], w)


def test_padding_is_counted_and_zero(pools):
    packed = PackedMatrix.pack(np.ones((65, 9), np.float32), pools[0])
    assert packed.panels.shape == (2, 16, 64)
    assert packed.nbytes == 2 * 16 * 64 * 4
    assert (packed.n_out, packed.n_in) == (65, 9)
    assert packed.panels.sum() == 65 * 9


def test_weights_may_be_any_view(pools):
    w = normal(100, 64)
    np.testing.assert_array_equal(PackedMatrix.pack(w.T, pools[0]).panels, PackedMatrix.pack(w.T.copy(), pools[0]).panels)


def test_out_is_written_and_returned(pools):
    packed, x = PackedMatrix.pack(normal(70, 16), pools[0]), normal(3, 16)
    out = np.full((3, 70), np.nan, np.float32)
    assert matmul(x, packed, pools[0], out) is out
    np.testing.assert_array_equal(out, matmul(x, packed, pools[0]))
    assert matmul(x[:0], packed, pools[0]).shape == (0, 70)


def test_not_a_number_stays_in_its_row(pools):
    packed, x = PackedMatrix.pack(normal(70, 16), pools[0]), normal(9, 16)
    clean = matmul(x, packed, pools[0])
    x[4, 3] = np.nan
    y = matmul(x, packed, pools[0])
    assert np.isnan(y[4]).all()
    np.testing.assert_array_equal(np.delete(y, 4, 0), np.delete(clean, 4, 0))


@pytest.mark.parametrize(
    ("x", "out", "message"),
    [
        (np.zeros((2, 5), np.float32), None, r"\(2, 5\).*\[rows, 16\]"),
        (np.zeros((2, 16)), None, "float64"),
        (np.zeros(16, np.float32), None, r"\(16,\)"),
        (np.zeros((2, 32), np.float32)[:, ::2], None, "C-contiguous"),
        (np.zeros((2, 16), np.float32), np.zeros((2, 71), np.float32), r"\(2, 70\)"),
    ],
)
def test_bad_rows_are_refused(pools, x, out, message):
    packed = PackedMatrix.pack(normal(70, 16), pools[0])
    with pytest.raises(InputError, match=message):
        matmul(x, packed, pools[0], out)


def test_parts_of_a_matrix_are_whole_and_alike(pools):
    w = normal(70, 16)
    for parts, message in (([], "0 rows"), ([w[:60]], "60 rows"), ([w, w], r"\[0, 70\)"), ([w[:60], bf16(w[60:])], "uint16")):
        with pytest.raises(InputError, match=message):
            pack(70, 16, parts, pools[0])
    np.testing.assert_array_equal(pack(70, 16, [w[:7], w[7:]], pools[0]).panels, PackedMatrix.pack(w, pools[0]).panels)


def test_bad_weights_are_refused(pools):
    packed = PackedMatrix.empty(70, 16)
    for row0, rows in ((-1, 1), (60, 11)):
        with pytest.raises(InputError, match=r"\[0, 70\)"):
            packed.fill(row0, np.zeros((rows, 16), np.float32), pools[0])
    with pytest.raises(InputError, match=r"\[rows, 16\]"):
        packed.fill(0, np.zeros((1, 15), np.float32), pools[0])
    with pytest.raises(InputError, match="at least 1"):
        PackedMatrix.empty(0, 16)
    with pytest.raises(InputError, match="float64"):
        PackedMatrix.pack(np.zeros((2, 16)), pools[0])
    with pytest.raises(InputError, match=r"uint16 .* must be float32"):
        packed.fill(0, np.zeros((2, 16), np.uint16), pools[0])
    with pytest.raises(InputError, match="n_out, n_in"):
        PackedMatrix.pack(np.zeros(16, np.float32), pools[0])
