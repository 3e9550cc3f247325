"""`KvRing`: golden traces, and a model ring that is moved as the plans say and must never lose a row."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import DATA

from memra_pp.cache import PRIME_CHUNK_MAX_TOKENS, Contiguous, KvRing, Rebase, swa_ring_rows
from memra_pp.errors import CacheError, RingLapped

TRACES = json.loads((DATA / "ring.json").read_text())


@pytest.mark.parametrize("trace", TRACES, ids=lambda t: f"window {t['window']}, context {t['max_ctx']}")
def test_golden_traces(trace):
    ring = KvRing(swa_ring_rows(trace["window"], trace["max_ctx"]), trace["window"])
    assert ring.rows == trace["ring_rows"]
    for step in trace["steps"]:
        match step:
            case {"op": "append", "result": "error", "why": why}:
                with pytest.raises(CacheError) as error:
                    ring.append_plan(step["len"], step["retain_from"], step["rows"])
                assert isinstance(error.value, RingLapped) == (why == "lapped"), step
            case {"op": "append", "result": "contiguous"}:
                plan = ring.append_plan(step["len"], step["retain_from"], step["rows"])
                assert plan == Contiguous(step["write_row"]), step
            case {"op": "append"}:
                plan = ring.append_plan(step["len"], step["retain_from"], step["rows"])
                assert plan == Rebase(step["src_row"], step["keep_rows"], step["new_base"], step["write_row"]), step
                ring.apply_rebase(plan.new_base)
            case {"op": "range", "result": "error"}:
                with pytest.raises(CacheError):
                    ring.physical_range(step["start"], step["end"])
            case {"op": "range"}:
                assert ring.physical_range(step["start"], step["end"]) == range(*step["result"]), step
            case _:
                assert ring.can_rewind_to(step["len"]) is step["result"], step


class ModelRing:
    """Rows in physical slots, moved as the ring's plans say, beside the rows that were written by absolute position."""

    def __init__(self, rows: int, window: int) -> None:
        self.ring = KvRing(rows, window)
        self.slots: list[object] = [None] * rows
        self.written: dict[int, object] = {}
        self.pos = 0

    def append(self, rows: int, retain_from: int) -> None:
        plan = self.ring.append_plan(self.pos, retain_from, rows)
        if isinstance(plan, Rebase):
            self.slots[: plan.keep_rows] = self.slots[plan.src_row : plan.src_row + plan.keep_rows]
        for i in range(rows):
            self.written[self.pos + i] = self.slots[plan.write_row + i] = object()
        if isinstance(plan, Rebase):
            self.ring.apply_rebase(plan.new_base)
        self.pos += rows

    def assert_readable(self, start: int, end: int) -> None:
        there = [self.slots[row] for row in self.ring.physical_range(start, end)]
        assert all(a is self.written[start + i] for i, a in enumerate(there)) and len(there) == end - start


@given(data=st.data(), rows=st.integers(1, 60), window=st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_no_retained_row_is_lost(data, rows, window):
    model = ModelRing(rows, window)
    for _ in range(data.draw(st.integers(1, 12))):
        pos, base = model.pos, model.ring.base
        retain_from = data.draw(st.integers(base, pos))
        n = data.draw(st.integers(0, rows + 2))
        if pos - retain_from + n > rows:
            with pytest.raises(CacheError):
                model.append(n, retain_from)
            assert (model.pos, model.ring.base) == (pos, base)
        else:
            model.append(n, retain_from)
            model.assert_readable(retain_from, model.pos)
        target = data.draw(st.integers(0, model.pos))
        start = max(0, target - (window - 1)) // 32 * 32
        assert model.ring.can_rewind_to(target) is (start >= model.ring.base)
        if data.draw(st.booleans()) and model.ring.can_rewind_to(target):
            model.assert_readable(start, target)
            model.pos = target


@pytest.mark.parametrize("retain_from", [31, 97, -1])
def test_rows_that_are_not_held_cannot_be_kept(retain_from):
    ring = KvRing(200, 32)
    ring.apply_rebase(32)
    with pytest.raises(RingLapped):
        ring.append_plan(96, retain_from, 1)
    assert ring.base == 32


def test_more_rows_in_use_than_there_are_is_an_error_but_not_a_lap():
    with pytest.raises(CacheError) as error:
        KvRing(100, 32).append_plan(101, 101, 0)
    assert not isinstance(error.value, RingLapped)


def test_a_full_ring_writes_at_row_0_only_what_is_nothing():
    assert KvRing(100, 32).append_plan(100, 64, 0) == Contiguous(0)
    assert KvRing(100, 32).append_plan(100, 64, 1) == Rebase(src_row=64, keep_rows=36, new_base=64, write_row=36)


@pytest.mark.parametrize(("start", "end"), [(31, 40), (40, 39), (32, 133)])
def test_a_range_before_the_base_reversed_or_longer_than_the_ring_is_an_error(start, end):
    ring = KvRing(100, 32)
    ring.apply_rebase(32)
    assert ring.physical_range(32, 132) == range(100)
    with pytest.raises(CacheError):
        ring.physical_range(start, end)


def test_a_base_never_goes_back():
    ring = KvRing(100, 32)
    ring.apply_rebase(64)
    with pytest.raises(CacheError, match=r"32.*64"):
        ring.apply_rebase(32)
    assert ring.base == 64


@given(st.integers(1, 5000), st.integers(0, 10**6))
def test_a_view_is_the_window_of_the_next_row_aligned_down_to_32(window, length):
    start = KvRing(1, window).view_start(length)
    assert start % 32 == 0 and start <= max(0, length - (window - 1)) < start + 32


@given(st.integers(1, 5000), st.integers(0, 10**6))
def test_one_longest_chunk_always_fits_behind_a_view(window, length):
    ring = KvRing(swa_ring_rows(window, 10**9), window)
    kept = length - ring.view_start(length)
    assert kept <= window + 30 and kept + PRIME_CHUNK_MAX_TOKENS <= ring.rows


def test_rows_of_a_ring():
    assert PRIME_CHUNK_MAX_TOKENS == 4096
    assert [swa_ring_rows(512, ctx) for ctx in (1, 4638, 4639, 4640, 10**6)] == [1, 4638, 4639, 4639, 4639]
    with pytest.raises(CacheError):
        KvRing(0, 32)
