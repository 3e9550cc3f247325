"""A ragged batch in one call is each session alone, to the byte: planes, lengths, ring bases, states, copies and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.cache import KvLayer, KvPolicy, KvRing, RecurLayer
from memra_pp.cache.cache import StateCopy
from memra_pp.cache.formats import BLOCK_BYTES
from memra_pp.config import KvPlan, RecurrentPlan
from memra_pp.errors import CacheError, CapacityExceeded, InputError, RingLapped
from memra_pp.kernels import CpuDev, append, append_numba, append_numpy
from memra_pp.kernels.addresses import state_row
from memra_pp.kernels.append import append_rows
from memra_pp.kernels.attention import AttentionSpec, attend_rows, attention
from memra_pp.kernels.batches import KvBatch, StateBatch, capture_table
from memra_pp.kernels.delta import DeltaShape, conv_silu, delta_scan
from memra_pp.kernels.spans import Spans
from memra_pp.kernels.threads import Threads

POLICIES = [
    KvPolicy(),
    KvPolicy(v="q4_0"),
    KvPolicy(k="f32", v="f32"),
    KvPolicy(fp8_ordinary=True),
    KvPolicy(k="q5_1", v="q8_0"),
]
WINDOW, MAX_CTX, RING_ROWS, MOST_ROWS = 5, 300, 64, 28
"""A ring here has room for a window, an aligned view and one short append, so that a few steps move its rows."""


@pytest.fixture(autouse=True, scope="module")
def even_small_work_is_shared():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memra_pp.kernels.attention.SHARE", 1)
        patch.setattr("memra_pp.kernels.delta.SHARE", 1)
        yield


@pytest.fixture(scope="module")
def pools():
    opened = {n: Threads(n) for n in (1, 2, 3)}
    yield opened
    for threads in opened.values():
        threads.close()


class Session:
    """One session's layer, and what is next in it."""

    def __init__(self, plan: KvPlan, policy: KvPolicy, ringed: bool) -> None:
        self.layer, self.pos = KvLayer.alloc(CpuDev(1 << 30), plan, 7, MAX_CTX, policy), 0
        if ringed:
            self.layer.ring = KvRing(RING_ROWS, WINDOW)

    @property
    def retain_from(self) -> int:
        return 0 if self.layer.ring is None else self.layer.ring.view_start(self.pos)

    def image(self) -> tuple[Any, ...]:
        """Everything the layer holds, and its books."""
        layer = self.layer
        return layer.k.tobytes(), layer.v.tobytes(), layer.len, int(layer.len_d[0]), layer.base


def rows_of(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


def batch_of(sessions: list[Session], rows: list[int]) -> KvBatch:
    return KvBatch.of([s.layer for s in sessions], Spans([s.pos for s in sessions], rows))


def compare(
    plan: KvPlan, group: int, kinds: list[tuple[KvPolicy, bool]], steps: list[list[int]], threads: Threads
) -> list[int]:
    """Steps of some sessions with rows of their own number, formats and kind of plane; where their planes begin at the end."""
    spec = AttentionSpec(plan.n_head_kv, plan.head_dim_k, plan.head_dim_v, plan.window, 0.2)
    together, alone = ([Session(plan, policy, ringed) for policy, ringed in kinds] for _ in range(2))
    rng = np.random.default_rng(sum(map(sum, steps)))
    with Threads(1) as one_thread:
        for rows in steps:
            q = rows_of(rng, sum(rows), plan.n_head_kv * group, plan.head_dim_k)
            k, v = rows_of(rng, sum(rows), plan.kv_dim_k), rows_of(rng, sum(rows), plan.kv_dim_v)
            batch = batch_of(together, rows)
            append_rows(batch, k, v, [s.retain_from for s in together])
            got = attend_rows(q, batch, spec, threads)
            at = 0
            for one, other, count in zip(alone, together, rows, strict=True):
                own, layer = slice(at, at + count), one.layer
                append(layer, one.pos, k[own], v[own], one.retain_from)
                formats = layer.layout.k_fmt, layer.layout.v_fmt
                want = attention(q[own], layer.k, layer.v, formats, spec, one.pos, layer.base, one_thread)
                np.testing.assert_array_equal(got[own], want)
                at += count
                one.pos += count
                other.pos += count
                assert one.image() == other.image()
    return [session.layer.base for session in together]


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_appends_and_attention(pools: dict[int, Threads], data: st.DataObject) -> None:
    n_head_kv, group = data.draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 1)]))
    dim_k, dim_v = data.draw(st.sampled_from([(32, 32), (64, 32), (32, 96)]))
    plan = KvPlan(n_head_kv, dim_k, dim_v, window=data.draw(st.sampled_from([None, 1, WINDOW])))
    ringed = st.booleans() if plan.window else st.just(False)
    kinds = data.draw(st.lists(st.tuples(st.sampled_from(POLICIES), ringed), min_size=1, max_size=5))
    count = st.one_of(st.integers(0, 3), st.integers(0, MOST_ROWS))
    steps = data.draw(st.lists(st.lists(count, min_size=len(kinds), max_size=len(kinds)), min_size=1, max_size=8))
    compare(plan, group, kinds, steps, pools[data.draw(st.sampled_from([1, 2, 3]))])


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: f"{policy.k} {policy.v} fp8={policy.fp8_ordinary}")
def test_rings_that_move_at_steps_of_their_own(pools: dict[int, Threads], policy: KvPolicy, threads: int) -> None:
    kinds = [(policy, True), (POLICIES[0], False), (policy, True), (policy, False)]
    steps = [[28, 9, 20, 1], [28, 1, 28, 2], [1, 1, 1, 1], [20, 5, 9, 28], [1, 1, 28, 1], [28, 28, 3, 1]]
    bases = compare(KvPlan(2, 64, 32, window=WINDOW), 2, kinds, steps, pools[threads])
    assert bases == [64, 0, 32, 0]


class Parts:
    """`Threads` that cut any work into `n` parts and do them here, one after another; `written` are the outputs of each."""

    def __init__(self, n: int) -> None:
        self.n, self.written = n, []

    def run(self, kernel: Any, total: int, grain: int, *args: Any) -> None:
        out, self.written = args[-1], []
        for part in range(self.n):
            out[:] = np.nan
            kernel(*args, total * part // self.n, total * (part + 1) // self.n)
            self.written.append(~np.isnan(out))


def every_kernel(rows: list[int], parts: Parts) -> Iterator[str]:
    """Runs attention, the convolution and the scan over sessions of `rows` rows, one K/V and v head, and yields their names."""
    rng, total = np.random.default_rng(0), sum(rows)
    sessions = [Session(KvPlan(1, 32, 32), KvPolicy(), False) for _ in rows]
    batch = batch_of(sessions, rows)
    append_rows(batch, rows_of(rng, total, 32), rows_of(rng, total, 32), [0] * len(rows))
    attend_rows(rows_of(rng, total, 64, 32), batch, AttentionSpec(1, 32, 32, None, 0.2), parts)  # type: ignore[arg-type]
    yield "attention"
    shape = DeltaShape(1, 1, 16, 16)
    states = states_of([state_of(shape, 3, rng) for _ in rows], batch.spans)
    conv_silu(rows_of(rng, total, shape.conv_width), rows_of(rng, 3, shape.conv_width), states, parts)  # type: ignore[arg-type]
    yield "convolution"
    half = np.full((total, 1), 0.5, np.float32)
    delta_scan(rows_of(rng, total, shape.conv_width), half, half, shape, states, parts)  # type: ignore[arg-type]
    yield "scan"


@pytest.mark.parametrize("count", [1, 2, 3, 7, 50])
def test_each_output_is_written_by_one_part(count: int) -> None:
    parts = Parts(count)
    for kernel in every_kernel([1, 150, 0, 2], parts):
        assert (np.sum(parts.written, axis=0) == 1).all(), kernel


def test_parts_are_of_like_work_and_not_of_like_many_sessions() -> None:
    """Half the keys that are read, where rows can be parted; the one long session alone, where they cannot."""
    parts, keys = Parts(2), np.array([1, 1, 1, *range(1, 21)])
    for kernel in every_kernel([1, 1, 1, 20], parts):
        second = parts.written[1].reshape(23, -1).all(axis=1)
        if kernel == "attention":
            assert 0.4 < keys[second].sum() / keys.sum() < 0.6
        else:
            assert np.flatnonzero(second).tolist() == list(range(3, 23)), kernel


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e9])
@pytest.mark.parametrize("plane", ["K", "V"])
@pytest.mark.parametrize("spoilt", [0, 1, 2])
def test_a_value_that_cannot_be_kept_changes_no_session(plane: str, value: float, spoilt: int) -> None:
    plan, rng = KvPlan(1, 32, 64, window=WINDOW), np.random.default_rng(0)
    sessions = [
        Session(plan, policy, ringed) for policy, ringed in ((POLICIES[0], True), (POLICIES[1], False), (POLICIES[0], True))
    ]
    rows = [60, 20, 61]
    append_rows(batch_of(sessions, rows), rows_of(rng, 141, 32), rows_of(rng, 141, 64), [0, 0, 0])
    for session, count in zip(sessions, rows, strict=True):
        session.pos += count
    before, rows = [session.image() for session in sessions], [20, 3, 18]
    k, v, at = rows_of(rng, 41, 32), rows_of(rng, 41, 64), [19, 21, 40][spoilt]
    (k if plane == "K" else v)[at, 17] = value
    position = sessions[spoilt].pos + [19, 1, 17][spoilt]
    with pytest.raises(CacheError, match=rf"layer 7: {plane} holds .* at position {position}, which q"):
        append_rows(batch_of(sessions, rows), k, v, [s.retain_from for s in sessions])
    assert [session.image() for session in sessions] == before
    append_rows(batch_of(sessions, rows), np.ones_like(k), np.ones_like(v), [s.retain_from for s in sessions])
    assert sessions[0].layer.base > 0 and sessions[2].layer.base > 0


def test_rows_that_do_not_fit_one_session_change_none() -> None:
    plan = KvPlan(1, 32, 32, window=WINDOW)
    flat, ringed = Session(plan, KvPolicy(), False), Session(plan, KvPolicy(), True)
    x = np.ones((280, 32), np.float32)
    append_rows(batch_of([flat, ringed], [280, 0]), x, x, [0, 0])
    flat.pos = 280
    before = [s.image() for s in (flat, ringed)]
    for rows, retain, error in (
        ([21, 5], [0, 0], CapacityExceeded),
        ([5, 65], [0, 0], CacheError),
        ([5, 5], [0, 1], RingLapped),
    ):
        x = np.ones((sum(rows), 32), np.float32)
        with pytest.raises(error):
            append_rows(batch_of([flat, ringed], rows), x, x, retain)
        assert [s.image() for s in (flat, ringed)] == before


def test_sessions_of_unlike_layers_and_queries_of_another_shape_are_refused(pools: dict[int, Threads]) -> None:
    a, b = (Session(KvPlan(1, dim, 32), KvPolicy(), False) for dim in (32, 64))
    with pytest.raises(InputError, match=r"layer 7 is .* in one session"):
        batch_of([a, b], [1, 1])
    batch, spec = batch_of([a, a], [1, 1]), AttentionSpec(1, 32, 32, None, 1.0)
    for q, shape in (
        (np.zeros((3, 1, 32), np.float32), spec),
        (np.zeros((2, 1, 32), np.float32), replace(spec, head_dim_v=64)),
    ):
        with pytest.raises(InputError, match="the batch has 2 for"):
            attend_rows(q, batch, shape, pools[1])
    a.layer.ring = KvRing(RING_ROWS, WINDOW)
    a.layer.ring.base = 1
    with pytest.raises(InputError, match="rows 0 to 0 are read, and the planes hold 300 from row 1"):
        attend_rows(np.zeros((2, 1, 32), np.float32), batch, spec, pools[1])
    a.layer.k = a.layer.k[:-40]
    with pytest.raises(InputError, match="bytes of K do not hold 300 rows"):
        batch_of([a], [1])


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_numpy_stores_the_bytes_that_numba_does(data: st.DataObject) -> None:
    codes = st.integers(0, len(BLOCK_BYTES) - 1)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    rows = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    k, v = rows_of(rng, sum(rows), 32), rows_of(rng, sum(rows), 64)
    if data.draw(st.booleans()) and len(k):
        v[data.draw(st.integers(0, len(v) - 1)), 3] = data.draw(st.sampled_from([np.nan, np.inf, 1e6]))
    kinds = [(data.draw(codes), data.draw(codes)) for _ in rows]
    places = [(data.draw(st.integers(0, 8)), 20, keep := data.draw(st.integers(0, 8)), keep) for _ in rows]
    held = rng.integers(0, 256, (2, len(rows), 30 * 256)).astype(np.uint8)
    results = []
    for backend in (append_numba, append_numpy):
        planes = held.copy()
        at = [(planes[0, i].ctypes.data, planes[1, i].ctypes.data, *kind) for i, kind in enumerate(kinds)]
        spans = Spans([0] * len(rows), rows).table
        refused = backend.store_rows(k, v, np.array(at, np.int64), spans, np.array(places, np.int64))
        assert refused < 0 or np.array_equal(planes, held)
        results.append((refused, planes.tobytes()))
    assert results[0] == results[1]


def state_of(shape: DeltaShape, taps: int, rng: np.random.Generator) -> RecurLayer:
    conv, ssm = rows_of(rng, shape.conv_width * (taps - 1)), rows_of(rng, shape.state_width)
    return RecurLayer(CpuDev(1), RecurrentPlan(shape.conv_width, taps, shape.state_width), conv, ssm, np.full_like(ssm, np.nan))


def states_of(states: list[RecurLayer], spans: Spans, captures: Any = ()) -> StateBatch:
    table = np.array([state_row(state) for state in states], np.int64)
    return StateBatch(states, table, spans, capture_table(captures, states, spans))


def blank_copy(state: RecurLayer) -> StateCopy:
    return StateCopy(np.full_like(state.conv_state, np.nan), np.full_like(state.ssm_state, np.nan))


def twin(state: RecurLayer) -> RecurLayer:
    return replace(state, **{name: getattr(state, name).copy() for name in ("conv_state", "ssm_state", "ssm_state_alt")})


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_states_and_the_copies_on_the_way(pools: dict[int, Threads], data: st.DataObject) -> None:
    """Against each session alone, cut into calls where its copies are taken."""
    shape = data.draw(st.sampled_from([DeltaShape(1, 1, 7, 5), DeltaShape(2, 4, 32, 32), DeltaShape(1, 3, 40, 24)]))
    taps, rng = data.draw(st.integers(1, 4)), np.random.default_rng(data.draw(st.integers(0, 9)))
    rows = data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    total = sum(rows)
    qkv, weight = rows_of(rng, total, shape.conv_width), rows_of(rng, taps, shape.conv_width)
    beta, decay = (rng.random((total, shape.n_v), dtype=np.float32) for _ in range(2))
    layers = [state_of(shape, taps, rng) for _ in rows]
    others = [twin(state) for state in layers]
    cuts = [sorted(data.draw(st.lists(st.integers(1, count), max_size=3))) if count else [] for count in rows]
    copies = [[blank_copy(state) for _ in own] for state, own in zip(layers, cuts, strict=True)]
    asked = [(i, cut, copy) for i, own in enumerate(cuts) for cut, copy in zip(own, copies[i], strict=True)]
    states = states_of(layers, Spans([0] * len(rows), rows), asked)
    threads = pools[data.draw(st.sampled_from([1, 2, 3]))]
    got = delta_scan(conv_silu(qkv, weight, states, threads), beta, decay, shape, states, threads)
    at = 0
    for i, (layer, other, count) in enumerate(zip(layers, others, rows, strict=True)):
        end, first = at + count, at
        for cut, copy in (*zip(cuts[i], copies[i], strict=True), (count, None)):
            own, one = slice(at, first + cut), states_of([other], Spans((0,), (first + cut - at,)))
            x = conv_silu(qkv[own], weight, one, pools[1])
            np.testing.assert_array_equal(got[own], delta_scan(x, beta[own], decay[own], shape, one, pools[1]))
            conv, ssm = (layer.conv_state, layer.ssm_state) if copy is None else (copy.conv, copy.ssm)
            np.testing.assert_array_equal(conv, other.conv_state)
            np.testing.assert_array_equal(ssm, other.ssm_state)
            at = first + cut
        assert at == end


def test_a_copy_of_another_size_or_of_no_row_is_refused() -> None:
    state = state_of(DeltaShape(1, 1, 8, 8), 3, np.random.default_rng(0))
    copy = blank_copy(state)
    for wrong in (replace(copy, conv=copy.conv[1:]), replace(copy, ssm=np.zeros(65, np.float32))):
        with pytest.raises(InputError, match="take a snapshot of this very cache"):
            states_of([state], Spans((0,), (1,)), [(0, 1, wrong)])
    for rows in (0, 3):
        with pytest.raises(InputError, match=f"after {rows} rows of 2"):
            states_of([state], Spans((0,), (2,)), [(0, rows, copy)])
