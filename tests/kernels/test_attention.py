"""Attention over packed rows: right, and the same bits for a row in any chunk, thread count or ring base."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.cache.formats import BLOCK_BYTES
from memra_pp.errors import ConfigError, InputError
from memra_pp.kernels import blocks
from memra_pp.kernels.attention import AttentionSpec, attention
from memra_pp.kernels.threads import Threads


@pytest.fixture(autouse=True, scope="module")
def even_small_work_is_shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memra_pp.kernels.attention.SHARE", 1)
        yield


@pytest.fixture(scope="module")
def pools():
    opened = {n: Threads(n) for n in (1, 2, 3)}
    yield opened
    for threads in opened.values():
        threads.close()


class Case:
    """Random stored rows and queries for every position."""

    def __init__(self, spec, group, tokens, seed=0, formats=("q8_0", "q5_1")):
        rng = np.random.default_rng(seed)
        self.spec, self.formats = spec, formats
        self.q = rng.standard_normal((tokens, spec.n_head_kv * group, spec.head_dim_k), dtype=np.float32)
        self.k, self.v = (
            blocks.quantize(fmt, rng.standard_normal((tokens, spec.n_head_kv * dim), dtype=np.float32))
            for fmt, dim in zip(formats, (spec.head_dim_k, spec.head_dim_v), strict=True)
        )

    def run(self, pos, stop, threads, base=0):
        """Rows `[pos, stop)`, from planes that hold rows `[base, stop)`."""
        planes = (plane[base:stop].reshape(-1) for plane in (self.k, self.v))
        return attention(self.q[pos:stop], *planes, self.formats, self.spec, pos, base, threads)

    def expected(self):
        """The same in f64, from the values read back."""
        spec, tokens = self.spec, len(self.q)
        k, v = (
            blocks.dequantize(fmt, plane).reshape(tokens, spec.n_head_kv, -1).astype(np.float64)
            for fmt, plane in zip(self.formats, (self.k, self.v), strict=True)
        )
        group = self.q.shape[1] // spec.n_head_kv
        k, v = (np.repeat(rows, group, axis=1) for rows in (k, v))
        scores = np.einsum("qhd,khd->hqk", self.q.astype(np.float64), k) * spec.scale
        ahead = np.arange(tokens)[:, None] - np.arange(tokens)
        scores[:, (ahead < 0) | (ahead >= (spec.window or tokens))] = -np.inf
        weights = np.exp(scores - scores.max(axis=2, keepdims=True))
        weights /= weights.sum(axis=2, keepdims=True)
        return np.einsum("hqk,khd->qhd", weights, v).reshape(tokens, -1)


def spec_of(n_head_kv=2, head_dim_k=64, head_dim_v=96, window=None):
    return AttentionSpec(n_head_kv, head_dim_k, head_dim_v, window, head_dim_k**-0.5)


@pytest.mark.parametrize("k_fmt", BLOCK_BYTES)
@pytest.mark.parametrize("v_fmt", BLOCK_BYTES)
def test_every_pair_of_formats(pools, k_fmt, v_fmt):
    case = Case(spec_of(window=21), group=3, tokens=75, formats=(k_fmt, v_fmt))
    assert np.abs(case.run(0, 75, pools[1]) - case.expected()).max() < 3e-6


@pytest.mark.parametrize("window", [None, 1, 31, 32, 33, 64])
@pytest.mark.parametrize(("head_dim_k", "head_dim_v"), [(32, 32), (256, 512), (512, 32)])
def test_every_window_and_head_size(pools, window, head_dim_k, head_dim_v):
    case = Case(spec_of(head_dim_k=head_dim_k, head_dim_v=head_dim_v, window=window, n_head_kv=1), group=2, tokens=100)
    assert np.abs(case.run(0, 100, pools[2]) - case.expected()).max() < 3e-6


@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_a_rows_bits_are_its_own(pools, data):
    """Chunks, threads and ring bases at random against one row at a time on a flat plane."""
    spec = spec_of(
        n_head_kv=data.draw(st.sampled_from([1, 2, 3])),
        head_dim_k=data.draw(st.sampled_from([32, 64, 96])),
        window=data.draw(st.sampled_from([None, 1, 5, 32, 50])),
    )
    group, tokens = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 140))
    formats = data.draw(st.sampled_from(["q8_0", "fp8", "f32"])), "q5_1"
    case = Case(spec, group, tokens, data.draw(st.integers(0, 9)), formats)
    alone = np.concatenate([case.run(row, row + 1, pools[1]) for row in range(tokens)])
    pos = 0
    while pos < tokens:
        stop = data.draw(st.integers(pos + 1, tokens))
        base = data.draw(st.integers(0, 0 if spec.window is None else max(0, pos - spec.window + 1)))
        threads = pools[data.draw(st.sampled_from([1, 2, 3]))]
        np.testing.assert_array_equal(case.run(pos, stop, threads, base), alone[pos:stop])
        pos = stop


def test_a_later_rows_nan_does_not_reach_back(pools):
    case = Case(spec_of(), group=1, tokens=40, formats=("f32", "f32"))
    clean = case.run(0, 40, pools[1])
    case.v[30].view(np.float32)[:] = np.nan
    case.k[35].view(np.float32)[:] = np.nan
    spoilt = case.run(0, 40, pools[1])
    np.testing.assert_array_equal(spoilt[:30], clean[:30])
    assert np.isnan(spoilt[30:]).all()


def test_large_scores_do_not_overflow(pools):
    case = Case(replace(spec_of(), scale=300.0), group=1, tokens=70, formats=("f32", "f32"))
    result = case.run(0, 70, pools[1])
    assert np.isfinite(result).all()
    assert np.abs(result - case.expected()).max() < 0.02


def test_a_plane_may_be_longer_and_there_may_be_no_rows(pools):
    case = Case(spec_of(), group=1, tokens=40)
    planes = [np.concatenate([plane.reshape(-1), np.full(8, 0xFF, np.uint8)]) for plane in (case.k, case.v)]
    for rows in (1, 0):
        got = attention(case.q[9 : 9 + rows], *planes, case.formats, case.spec, 9, 0, pools[1])
        np.testing.assert_array_equal(got, case.run(9, 10, pools[1])[:rows])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.zeros((1, 3, 64), np.float32)}, "multiple of 2"),
        ({"q": np.zeros((1, 2, 32), np.float32)}, "64"),
        ({"q": np.zeros((1, 2, 64))}, "float64"),
        ({"k_plane": np.zeros(40 * 136, np.int8)}, "k_plane.*uint8"),
        ({"pos": 40}, "rows 0 to 40 are read, and the planes hold 40 from row 0"),
        ({"pos": -1}, "position -1"),
        ({"base": 1}, "rows 0 to 5 are read, and the planes hold 40 from row 1"),
        ({"v_plane": np.zeros(5 * 144, np.uint8)}, "rows 0 to 5 are read, and the planes hold 5 "),
    ],
)
def test_bad_arguments_are_refused(pools, change, message):
    case = Case(spec_of(), group=1, tokens=40)
    arguments = {"q": case.q[:1], "k_plane": case.k.reshape(-1), "v_plane": case.v.reshape(-1), "pos": 5, "base": 0}
    with pytest.raises(InputError, match=message):
        attention(**{**arguments, **change}, formats=case.formats, spec=case.spec, threads=pools[1])


def test_an_unknown_format_is_refused(pools):
    case = Case(spec_of(), group=1, tokens=40)
    with pytest.raises(ConfigError, match="v_fmt='q4_1'"):
        attention(case.q[:1], case.k.reshape(-1), case.v.reshape(-1), ("q8_0", "q4_1"), case.spec, 0, 0, pools[1])


@pytest.mark.parametrize(
    "change",
    [{"n_head_kv": 0}, {"head_dim_k": 48}, {"head_dim_v": 0}, {"window": 0}, {"scale": np.inf}],
)
def test_bad_specs_are_refused(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        replace(spec_of(), **change)
