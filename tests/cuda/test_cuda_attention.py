"""The attention kernels of the CUDA source, executed on the CPU, against the CPU's own."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest

from memra_pp.cache.formats import BLOCK, BLOCK_BYTES
from memra_pp.kernels import blocks
from memra_pp.kernels.addresses import plane_row
from memra_pp.kernels.attention import AttentionSpec, attention
from memra_pp.kernels.spans import Spans
from memra_pp.kernels.threads import Threads

SPLIT, VECTORS = 256, (1, 2, 4, 8, 16)
EDGES = (0, 31, 32, 255, 256, 257, 1000)
"""Positions at the edges of tiles and splits."""
CLOSE = 2e-6
"""Between splits and the CPU, for values of size 1 to 4: a few units in the last place."""


@pytest.fixture(scope="module")
def threads():
    with Threads(1) as one:
        yield one


@pytest.fixture(params=[0, 1, 2])
def order(request):
    """In which threads take turns."""
    return request.param


@dataclass
class Session:
    """`rows` query rows from `pos` on, over planes that hold the absolute rows from `base` on."""

    pos: int
    rows: int
    base: int = 0
    formats: tuple[str, str] = ("q8_0", "q5_1")


class Batch:
    """Random queries and stored rows. A session's depend on its seed alone."""

    def __init__(self, sessions, *, group=2, n_head_kv=2, dim_k=32, dim_v=64, window=None, scale=None, seeds=None):
        self.sessions, self.group = sessions, group
        self.spec = AttentionSpec(n_head_kv, dim_k, dim_v, window, dim_k**-0.5 if scale is None else scale)
        self.spans = Spans([s.pos for s in sessions], [s.rows for s in sessions])
        seeds = range(len(sessions)) if seeds is None else seeds
        self.q, self.planes = zip(*map(self._session, sessions, seeds), strict=True)

    def _session(self, session, seed):
        rng = np.random.default_rng(seed)
        q = rng.standard_normal((session.rows, self.spec.n_head_kv * self.group, self.spec.head_dim_k), np.float32)
        end = session.pos + session.rows
        planes = [
            plane_of(blocks.quantize(fmt, rng.standard_normal((end, self.spec.n_head_kv * dim), np.float32))[session.base :])
            for fmt, dim in zip(session.formats, (self.spec.head_dim_k, self.spec.head_dim_v), strict=True)
        ]
        return q, planes

    def cut(self, row):
        """The batch of this row alone of the one session, on planes that end with it."""
        (session,), (q,), (planes,) = self.sessions, self.q, self.planes
        held = session.pos + session.rows - session.base
        stored = session.pos + row + 1 - session.base
        alone = copy(self)
        alone.sessions = [replace(session, pos=session.pos + row, rows=1)]
        alone.spans = Spans([session.pos + row], [1])
        alone.q, alone.planes = [q[row : row + 1]], [[plane_of(plane.reshape(held, -1)[:stored]) for plane in planes]]
        return alone

    def expected(self, threads):
        return np.concatenate(
            [
                attention(q, *planes, session.formats, self.spec, session.pos, session.base, threads)
                for session, q, planes in zip(self.sessions, self.q, self.planes, strict=True)
            ]
        )

    def room(self, dim, side):
        return max(16 * ((dim // BLOCK * BLOCK_BYTES[s.formats[side]] + 29) // 16 | 1) for s in self.sessions)

    def decode(self, kernels, *, height=1, heads=None, order=0):
        spec, heads = self.spec, heads or self.group
        dim_k, dim_v = spec.head_dim_k, spec.head_dim_v
        splits = self.splits(height)
        table, results, arguments = self._launch(height, heads, splits * (dim_v + 4))
        vectors = min(n for n in VECTORS if n >= height * heads)
        shared = 4 * vectors * (dim_k + dim_v + 168) + 64 * (self.room(dim_k, 0) + self.room(dim_v, 1))
        grid = spec.n_head_kv * -(-self.group // heads), splits, len(table)
        kernels.launch(f"attend_split_{vectors}", grid, 128, arguments, shared, order)
        n_head = spec.n_head_kv * self.group
        out = np.full((self.spans.total, n_head * dim_v), np.nan, np.float32)
        numbers = map(np.int32, (n_head, dim_v, spec.window or 0, splits))
        kernels.launch("attend_combine", (n_head, height, len(table)), 256, [results, table, *numbers, out], order=order)
        return out

    def splits(self, height):
        """The most that any block of rows touches."""
        table, window = self.spans.blocks(height, self.spec.window)[0], self.spec.window
        first = np.maximum(table[:, 3] - window + 1, 0) if window else np.zeros(len(table), int)
        return int(((table[:, 3] + table[:, 2] - 1) // SPLIT - first // SPLIT).max() + 1)

    def _launch(self, height, heads, width):
        """The blocks of rows, an output of `width` a row and head, and the arguments."""
        spec, n_head = self.spec, self.spec.n_head_kv * self.group
        table = self.spans.blocks(height, spec.window)[0]
        pairs = zip(self.planes, self.sessions, strict=True)
        places = np.array([plane_row(*planes, *session.formats) for planes, session in pairs], np.int64)
        bases = np.array([session.base for session in self.sessions], np.int64)
        numbers = heads, n_head, spec.n_head_kv, spec.head_dim_k, spec.head_dim_v, spec.window or 0
        out = np.full((self.spans.total, n_head, width), np.nan, np.float32)
        arguments = [np.concatenate(self.q), places, bases, table, *map(np.int32, numbers), np.float32(spec.scale), out]
        return table, out, arguments


def plane_of(rows):
    """The rows as a plane that ends where its memory does."""
    plane = rows.reshape(-1).copy()
    assert plane.ctypes.data % 16 == 0
    return plane


def ringed(positions, rows, window):
    """Sessions whose planes begin with the first row that is seen."""
    return [Session(pos, rows, 0 if window is None else max(0, pos - window + 1)) for pos in positions]


def check(kernels, threads, batch, order, *, height, heads=None):
    expected = batch.expected(threads)
    assert np.abs(batch.decode(kernels, height=height, heads=heads, order=order) - expected).max() < CLOSE


def same_bits(got, expected):
    np.testing.assert_array_equal(got.view(np.uint32), expected.view(np.uint32))


def test_every_pair_of_formats_in_one_batch(kernels, threads, order):
    sessions = [Session(40, 3, formats=pair) for pair in product(BLOCK_BYTES, BLOCK_BYTES)]
    check(kernels, threads, Batch(sessions, dim_k=64, dim_v=96, window=37), order, height=2)


@pytest.mark.parametrize("window", [None, 1, 33, 256, 300])
def test_every_edge_in_one_batch(kernels, threads, order, window):
    check(kernels, threads, Batch(ringed(EDGES, 3, window), dim_v=32, window=window), order, height=3)


@pytest.mark.parametrize(("group", "heads"), [(1, 1), (4, 4), (8, 8), (8, 4), (7, 7), (6, 4), (5, 1)])
def test_every_group(kernels, threads, group, heads):
    """Whole and in parts, of which the last may be smaller."""
    batch = Batch([Session(270, 5), Session(3, 1)], group=group, dim_v=32)
    check(kernels, threads, batch, 0, height=max(1, 8 // heads), heads=heads)


@pytest.mark.parametrize(("dim_k", "dim_v"), [(32, 32), (96, 160), (128, 128), (160, 96), (256, 256), (32, 512), (512, 32)])
@pytest.mark.parametrize("formats", [("q8_0", "q5_1"), ("f32", "q4_0"), ("fp8", "fp8")])
def test_every_head_size(kernels, threads, dim_k, dim_v, formats):
    batch = Batch([Session(70, 2, formats=formats)], dim_k=dim_k, dim_v=dim_v, n_head_kv=3)
    check(kernels, threads, batch, 0, height=2)


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(kernels, threads, seed):
    rng = np.random.default_rng(seed)
    window = [None, int(rng.integers(1, 400))][rng.integers(2)]
    sessions = ringed(rng.integers(0, 600, rng.integers(1, 7)).tolist(), 1, window)
    for session in sessions:
        session.rows = int(rng.integers(1, 7))
        session.formats = tuple(rng.choice(list(BLOCK_BYTES), 2).tolist())
    group, n_head_kv = int(rng.integers(1, 9)), int(rng.integers(1, 4))
    dim_k, dim_v = (32 * int(n) for n in rng.integers(1, 5, 2))
    batch = Batch(sessions, group=group, n_head_kv=n_head_kv, dim_k=dim_k, dim_v=dim_v, window=window)
    check(kernels, threads, batch, int(rng.integers(3)), height=int(rng.integers(1, 8 // group + 1)))


def test_a_rows_bits_are_its_own(kernels):
    """By splits too: alone, with other rows and other sessions, and as one of few vectors or of many."""
    window = 300
    sessions = ringed([5, 254, 600], 4, window)
    together = Batch(sessions, dim_v=32, window=window)
    whole = together.decode(kernels, height=4)
    for height in (1, 2, 3):
        same_bits(together.decode(kernels, height=height), whole)
    same_bits(together.decode(kernels, height=2, heads=1), whole)
    for seed, session in enumerate(sessions):
        alone = Batch([session], dim_v=32, window=window, seeds=[seed])
        rows = slice(4 * seed, 4 * seed + 4)
        same_bits(alone.decode(kernels, height=4), whole[rows])
        for row in range(4):
            same_bits(alone.cut(row).decode(kernels), whole[rows][row : row + 1])


def test_a_later_rows_nan_does_not_reach_back(kernels, threads):
    batch = Batch([Session(20, 16, formats=("f32", "f32"))], group=1, dim_v=32)
    clean = batch.expected(threads)
    k, v = (plane.view(np.float32).reshape(36, -1) for plane in batch.planes[0])
    v[30], k[33] = np.nan, np.nan
    got = batch.decode(kernels, height=8)
    assert np.abs(got[:10] - clean[:10]).max() < CLOSE
    assert np.isnan(got[10:]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_is_not_hidden(kernels, threads, value):
    batch = Batch([Session(300, 1, formats=("f32", "f32"))], group=1, dim_v=32)
    batch.planes[0][0].view(np.float32).reshape(301, -1)[7] = value
    expected = np.isnan(batch.expected(threads))
    assert expected.any()
    np.testing.assert_array_equal(np.isnan(batch.decode(kernels)), expected)


def test_large_scores_do_not_overflow(kernels, threads):
    batch = Batch([Session(600, 4, formats=("f32", "f32"))], group=1, dim_v=32, scale=300.0)
    expected, got = batch.expected(threads), batch.decode(kernels, height=4)
    assert np.isfinite(got).all()
    assert np.abs(got - expected).max() < 0.02


def test_what_no_row_sees_does_not_matter(kernels, threads):
    batch = Batch([Session(40, 1)], window=8, dim_v=32)
    expected = batch.expected(threads)
    for plane in batch.planes[0]:
        plane.reshape(41, -1)[:33] = 0xFF  # NaN in q8_0 and in q5_1
    assert np.abs(batch.decode(kernels) - expected).max() < CLOSE
