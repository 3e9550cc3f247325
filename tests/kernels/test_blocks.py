"""Packed bytes against public reference quantisers, and the compiled backend against the NumPy one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from memra_pp.cache.formats import BLOCK_BYTES
from memra_pp.errors import ConfigError, InputError
from memra_pp.kernels import blocks, blocks_numba, blocks_numpy

GOLDEN = Path(__file__).parent.parent / "data" / "kv_blocks.npz"
PACKED_FORMATS = [fmt for fmt in BLOCK_BYTES if fmt != "f32"]

awkward = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 0.5, -0.5, 2.5, 127.0, 448.0, 464.0, 1e-40, -1e-45, 3.4e38, np.inf, -np.inf]),
)


@pytest.fixture(scope="module")
def golden():
    with np.load(GOLDEN) as data:
        return dict(data)


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
@pytest.mark.parametrize("backend", [blocks_numba, blocks_numpy])
def test_golden_bytes_and_values(golden, fmt, backend):
    x, expected = golden["x"], golden[fmt]
    packed, values = np.empty(expected.size, np.uint8), np.empty(x.size, np.float32)
    getattr(backend, f"quantize_{fmt}")(x.reshape(-1), packed, 0, len(x))
    np.testing.assert_array_equal(packed, expected.reshape(-1))
    getattr(backend, f"dequantize_{fmt}")(packed, 0, values, 0, len(x))
    np.testing.assert_array_equal(values, golden[f"{fmt}_dequant"].reshape(-1))


def both(fmt, x):
    results = []
    for backend in (blocks_numba, blocks_numpy):
        packed = np.empty(len(x) * BLOCK_BYTES[fmt], np.uint8)
        getattr(backend, f"quantize_{fmt}")(x.reshape(-1), packed, 0, len(x))
        results.append(packed)
    return results


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
@given(x=hnp.arrays(np.float32, (3, 32), elements=awkward))
@settings(max_examples=150, deadline=None)
def test_backends_agree_on_odd_blocks(fmt, x):
    compiled, plain = both(fmt, x)
    np.testing.assert_array_equal(compiled, plain)


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_backends_agree_on_every_magnitude(fmt):
    rng = np.random.default_rng(5)
    x = rng.standard_normal((20000, 32)).astype(np.float32) * 10.0 ** rng.integers(-45, 38, (20000, 1))
    compiled, plain = both(fmt, x.astype(np.float32))
    np.testing.assert_array_equal(compiled, plain)


@pytest.mark.parametrize("fmt", PACKED_FORMATS)
def test_backends_read_every_byte_alike(fmt):
    packed = np.random.default_rng(6).integers(0, 256, 5000 * BLOCK_BYTES[fmt]).astype(np.uint8)
    compiled, plain = np.empty(5000 * 32, np.float32), np.empty(5000 * 32, np.float32)
    getattr(blocks_numba, f"dequantize_{fmt}")(packed, 0, compiled, 0, 5000)
    getattr(blocks_numpy, f"dequantize_{fmt}")(packed, 0, plain, 0, 5000)
    np.testing.assert_array_equal(compiled, plain)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_block_of_zeros_has_the_reference_scale(zero):
    x = np.full(32, zero, np.float32)
    assert blocks.quantize("q4_0", x)[:2].tolist() == [0x00, 0x80]
    assert blocks.quantize("q8_0", x)[:2].tolist() == [0, 0]
    sign = 0x80 if np.signbit(zero) else 0
    assert blocks.quantize("q5_1", x)[:4].tolist() == [0, 0, 0, sign]


@pytest.mark.parametrize("backend", [blocks_numba, blocks_numpy])
def test_of_equal_minima_q5_1_keeps_the_first_zeros_sign(backend):
    x = np.random.default_rng(2).choice(np.array([0.0, -0.0, 1.0, 2.0], np.float32), (500, 32))
    packed = np.empty(500 * 24, np.uint8)
    backend.quantize_q5_1(x.reshape(-1), packed, 0, 500)
    first_zero = np.take_along_axis(x, (x == 0).argmax(axis=1)[:, None], axis=1)[:, 0]
    np.testing.assert_array_equal(packed.reshape(500, 24)[:, 3] == 0x80, np.signbit(first_zero))


def test_halves_round_away_from_zero_in_q8_0():
    x = np.zeros(32, np.float32)
    x[:4] = [127, 0.5, 2.5, -0.5]
    assert blocks.quantize("q8_0", x)[2:6].view(np.int8).tolist() == [127, 1, 3, -1]


def test_fp8_rounds_saturates_and_keeps_nan():
    x = np.zeros(32, np.float32)
    x[:9] = [449, -1e9, np.inf, -np.inf, np.nan, -np.nan, 1.0625, 1.1875, 2.0**-10]
    assert blocks.quantize("fp8", x)[:9].tolist() == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x7F, 0x38, 0x3A, 0]


@pytest.mark.parametrize("fmt", BLOCK_BYTES)
def test_a_nan_is_never_a_silent_zero(fmt):
    x = np.ones(32, np.float32)
    x[7] = np.nan
    assert np.isnan(blocks.dequantize(fmt, blocks.quantize(fmt, x))[7])


@pytest.mark.parametrize("fmt", BLOCK_BYTES)
def test_leading_axes_are_free(fmt):
    x = np.random.default_rng(1).standard_normal((2, 3, 64)).astype(np.float32)
    packed = blocks.quantize(fmt, x)
    assert packed.shape == (2, 3, 2 * BLOCK_BYTES[fmt])
    np.testing.assert_array_equal(packed[1, 2], blocks.quantize(fmt, x[1, 2]))
    values = blocks.dequantize(fmt, packed)
    assert values.shape == x.shape
    assert np.abs(values - x).max() < {"f32": 1e-30, "q8_0": 0.02, "q5_1": 0.1, "q4_0": 0.3, "fp8": 0.2}[fmt]
    np.testing.assert_array_equal(blocks.quantize(fmt, x[:, ::2]), packed[:, ::2])


def test_f32_is_the_bytes_themselves():
    x = np.random.default_rng(1).standard_normal((2, 32)).astype(np.float32)
    packed = blocks.quantize("f32", x)
    assert packed.tobytes() == x.tobytes()
    assert blocks.dequantize("f32", packed).tobytes() == x.tobytes()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: blocks.quantize("q6_k", np.zeros(32, np.float32)), ConfigError, "q6_k.*q8_0"),
        (lambda: blocks.dequantize("q6_k", np.zeros(34, np.uint8)), ConfigError, "q6_k.*q8_0"),
        (lambda: blocks.quantize("q8_0", np.zeros(33, np.float32)), InputError, r"\(33,\).*32"),
        (lambda: blocks.quantize("q8_0", np.zeros(32)), InputError, "float64.*float32"),
        (lambda: blocks.quantize("q8_0", np.float32(1) + np.zeros((), np.float32)), InputError, "shape"),
        (lambda: blocks.dequantize("q5_1", np.zeros(25, np.uint8)), InputError, r"\(25,\).*24"),
        (lambda: blocks.dequantize("q5_1", np.zeros(24, np.int8)), InputError, "int8.*uint8"),
        (
            lambda: blocks.quantize_into("q8_0", np.zeros((4, 64), np.float32)[:, :32], np.zeros(136, np.uint8)),
            InputError,
            "C-contiguous",
        ),
        (lambda: blocks.quantize_into("q8_0", np.zeros(32, np.float32), np.zeros(35, np.uint8)), InputError, "34"),
        (lambda: blocks.dequantize_into("q8_0", np.zeros(34, np.uint8), np.zeros(64, np.float32)), InputError, "32"),
    ],
)
def test_bad_arguments_say_what_is_allowed(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_backend_is_compiled_here():
    assert blocks.backend() == "numba"
