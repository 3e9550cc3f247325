"""A real ringed cache beside the driver's `CachePlan`: they always agree, and no row a reader needs is ever wrong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule
from toy import F32, FLAT, PACKED, RINGED, feed, model, rows_of

from memra_pp.cache import Cache, CachePlan, CacheSnapshot, SnapshotMark
from memra_pp.config import KvPlan
from memra_pp.errors import CacheError, CapacityExceeded, SnapshotPinned
from memra_pp.kernels import CpuDev, blocks

MODEL = model(RINGED, FLAT, KvPlan(1, 32, 32, window=100, ring="reader"), RINGED)
RINGS = [(0, 32), (2, 100), (3, 32)]
CTX = 60_000


def view_start(window: int, n: int) -> int:
    return max(0, n - (window - 1)) // 32 * 32


def outcome(action, *args) -> type[CacheError] | None:
    """What an action is refused with, None if it is not."""
    try:
        action(*args)
    except CacheError as error:
        return type(error)
    return None


@dataclass(eq=False)
class Taken:
    """A snapshot of the cache, and its mark in the driver's books."""

    snap: CacheSnapshot
    mark: SnapshotMark


class CacheAndPlan(RuleBasedStateMachine):
    """`written[a]` is the serial number of the row last written at absolute position `a`."""

    snapshots = Bundle("snapshots")

    @initialize(policy=st.sampled_from([F32, PACKED]))
    def open(self, policy):
        self.cache = Cache.new(CpuDev(1 << 30), MODEL, CTX, policy=policy)
        self.plan = CachePlan.of(MODEL, CTX, policy)
        self.written = np.full(CTX, -1)
        self.serial = 0
        self.live: list[Taken] = []

    def feed(self, serials):
        pos = self.cache.pos
        self.plan.append(len(serials))
        feed(self.cache, serials)
        self.written[pos : pos + len(serials)] = serials

    @rule(rows=st.one_of(st.integers(1, 40), st.integers(0, 4300), st.integers(4000, 4160)))
    def append(self, rows):
        pos = self.cache.pos
        pins = [taken.snap.pos for taken in self.live if taken.mark.pin]
        room = [32 + 4127 - (pos - min(view_start(32, p) for p in [pos, *pins]))]
        room += [100 + 4127 - (pos - min(view_start(100, p) for p in [pos, *pins]))]
        fits, in_context = rows <= min(room), pos + rows <= CTX
        refused = outcome(self.plan.check_append, rows)
        assert outcome(self.cache.plan.check_append, rows) is refused
        assert self.plan.rows_possible() == self.cache.plan.rows_possible() == min(CTX - pos, *room)
        assert refused is (None if fits and in_context else SnapshotPinned if in_context and pins else refused)
        assert (refused is CapacityExceeded) == (not in_context)
        if refused is None:
            self.feed(np.arange(self.serial, self.serial + rows))
            self.serial += rows
        else:
            assert outcome(self.plan.append, rows) is refused

    @rule(target=snapshots, pin=st.booleans())
    def snapshot(self, pin):
        if len(self.live) == 4:
            return multiple()
        taken = Taken(self.cache.snapshot(pin), self.plan.snapshot(pin))
        self.live.append(taken)
        return taken

    @rule(taken=snapshots)
    def drop(self, taken):
        taken.snap.close()
        self.plan.drop(taken.mark)
        self.live = [other for other in self.live if other is not taken]

    @rule(taken=snapshots, share=st.sampled_from([-1, 0, 0.3, 1, 2]), refresh=st.booleans())
    def rollback_and_replay(self, taken, share, refresh):
        snap, mark = taken.snap, taken.mark
        fed = self.cache.pos - snap.pos
        accept = max(-1, int(fed * share)) if fed or share < 2 else 1
        held = all(view_start(window, snap.pos) >= self.cache.kv[il].base for il, window in RINGS)
        allowed = taken in self.live and 0 <= accept <= fed and held
        assert self.cache.can_rollback(snap, accept) == self.plan.can_rollback(mark, accept) == allowed
        assert outcome(self.cache.rollback, snap, accept) is outcome(self.plan.rollback, mark, accept)
        if allowed:
            self.live = self.live[: self.live.index(taken) + 1]
            assert self.cache.pos == snap.pos
            assert all(layer.len == snap.pos + accept for layer in self.cache.kv if layer is not None)
            self.feed(self.written[snap.pos : snap.pos + accept].copy())
            if refresh:
                self.live.pop()
                self.cache.snapshot_into(snap, mark.pin)
                self.plan.drop(mark)
                taken.mark = self.plan.snapshot(mark.pin)
                self.live.append(taken)

    @invariant()
    def they_stand_at_the_same_place(self):
        assert self.plan.pos == self.cache.pos
        assert [(m.pos, m.pin) for m in self.plan.live] == [(m.pos, m.pin) for m in self.cache.plan.live]
        bases = {ring.window: ring.base for ring in self.plan._rings}
        assert bases == {window: self.cache.kv[il].base for il, window in RINGS}
        assert self.cache.kv[0].base == self.cache.kv[3].base

    @invariant()
    def every_row_that_a_reader_needs_is_right(self):
        places = {self.cache.pos} | {t.snap.pos for t in self.live if self.cache.can_rollback(t.snap, 0)}
        for n in places:
            for il, window in RINGS:
                self.assert_rows(self.cache.kv[il], view_start(window, n), n)
            self.assert_rows(self.cache.kv[1], max(0, n - 100), n)

    def assert_rows(self, layer, start, end):
        rows, serials = layer.physical_rows(start, end), self.written[start:end]
        for plane, fmt, size, x in (
            (layer.k, layer.layout.k_fmt, layer.k_tok_bytes, rows_of(serials, layer.kv_dim_k)),
            (layer.v, layer.layout.v_fmt, layer.v_tok_bytes, rows_of(-serials, layer.kv_dim_v)),
        ):
            assert plane[rows.start * size : rows.stop * size].tobytes() == blocks.quantize(fmt, x).tobytes()

    def teardown(self):
        if hasattr(self, "cache"):
            self.cache.close()
            assert self.cache.pos == self.plan.pos


TestCacheAndPlan = CacheAndPlan.TestCase
TestCacheAndPlan.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_one_ring_stands_for_all_layers_of_a_window():
    assert sorted(ring.window for ring in CachePlan.of(MODEL, CTX, PACKED)._rings) == [32, 100]
    assert CachePlan.of(MODEL, CTX, F32).rows_possible() == 32 + 4127


def test_without_rings_only_the_context_bounds():
    plan = CachePlan.of(model(FLAT), 100, PACKED)
    plan.snapshot()
    plan.append(60)
    assert plan.rows_possible() == 40
    plan.append(40)
    with pytest.raises(CapacityExceeded, match="100 rows"):
        plan.append(1)
    assert plan.pos == 100


def test_a_context_within_the_ring_never_laps():
    plan = CachePlan.of(MODEL, 3000, PACKED)
    mark = plan.snapshot()
    plan.append(3000)
    assert plan.rows_possible() == 0 and plan.can_rollback(mark, 3000)
