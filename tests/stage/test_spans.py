"""`Spans`: a stage's time adds up, a pause is no bubble, and no more spans are kept than an answer carries."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from memra_pp.stage import spans as spans_module
from memra_pp.stage.frames import MAX_HEAD_BYTES, MAX_MICROS, SPANS, STEP, Entry, Frame, encode
from memra_pp.stage.spans import BLOCKED, COMPUTE, FIELDS, MAX_SPANS, RECV, SEND, Spans, clock


@pytest.fixture
def now(monkeypatch):
    """Sets the time."""
    at = [0.0]
    monkeypatch.setattr(spans_module, "monotonic", lambda: at[0])

    def set_time(seconds):
        at[0] = seconds

    return set_time


def frame(number=1, rows=0, **micros):
    return Frame(number, [Entry(STEP, 1, 1, 1, 0, rows), Entry(STEP, 2, 1, 1, 0, 1)], **micros)


def computed(spans, now, began, ended, **of):
    now(ended)
    spans.computed(one := frame(**of), began)
    return one


def taken(spans):
    return np.frombuffer(spans.take(), np.int64).reshape(-1, len(FIELDS)).tolist()


def test_the_time_from_the_first_frame_to_the_last_is_busy_or_waiting_for_input_or_output(now):
    spans = Spans(2)
    assert spans.totals() == {"busy_s": 0, "wait_in_s": 0, "wait_out_s": 0, "bubble": 0}
    computed(spans, now, 10.0, 10.25)
    assert spans.totals() == {"busy_s": 0.25, "wait_in_s": 0, "wait_out_s": 0, "bubble": 0}
    one = computed(spans, now, 10.5, 11.0)
    now(11.125)
    spans.blocked(one)
    computed(spans, now, 11.25, 12.0)
    totals = spans.totals()
    assert totals == {"busy_s": 1.5, "wait_in_s": 0.375, "wait_out_s": 0.125, "bubble": 0.25}
    assert sum(totals[name] for name in ("busy_s", "wait_in_s", "wait_out_s")) == 12.0 - 10.0


@pytest.mark.parametrize(
    "stages, before, slowest, wait, counts",
    [
        (2, 0.1, 0.0, 0.5, True),
        (2, 0.1, 0.0, 0.625, False),
        (8, 0.1, 0.0, 0.75, True),
        (8, 0.1, 0.0, 0.875, False),
        (2, 0.1, 2.0, 4.0, True),
        (2, 0.1, 2.0, 4.25, False),
        (2, 1.0, 0.0, 2.0, True),
    ],
)
def test_a_wait_longer_than_the_pipeline_can_have_been_at_work_is_no_bubble(now, stages, before, slowest, wait, counts):
    spans = Spans(stages)
    computed(spans, now, 0.0, before)
    computed(spans, now, before + wait, before + wait + 1.0, slowest=int(slowest * 1e6))
    totals = spans.totals()
    assert totals["wait_in_s"] == pytest.approx(wait)
    assert totals["bubble"] == pytest.approx(wait / (wait + before + 1.0) if counts else 0.0)


def test_a_frame_knows_how_long_the_slowest_stage_took_for_it(now):
    for slowest, took, then in ((0, 0.25, 250_000), (250_000, 0.125, 250_000), (0, 5000.0, MAX_MICROS), (7, 0.0, 7)):
        assert computed(Spans(1), now, 1.0, 1.0 + took, slowest=slowest).slowest == then


def test_a_frame_knows_how_long_all_stages_took_for_it(now):
    for busy, took, then in ((0, 0.25, 250_000), (250_000, 0.125, 375_000), (250_000, 5000.0, MAX_MICROS), (7, 0.0, 7)):
        assert computed(Spans(1), now, 1.0, 1.0 + took, busy=busy).busy == then


def test_spans_are_kept_from_when_they_are_asked_for_until_they_are_taken(now):
    spans = Spans(1)
    computed(spans, now, 1.0, 2.0)
    assert taken(spans) == []
    spans.trace()
    one = computed(spans, now, 3.0, 4.0, number=7, rows=5)
    now(4.5)
    spans.blocked(one)
    spans.keep(one, SEND, 4.5, 4.75)
    second = 1_000_000_000
    assert taken(spans) == [
        [7, RECV, 2 * second, 3 * second, 6, 2],
        [7, COMPUTE, 3 * second, 4 * second, 6, 2],
        [7, BLOCKED, 4 * second, 4.5 * second, 6, 2],
        [7, SEND, 4.5 * second, 4.75 * second, 6, 2],
    ]
    computed(spans, now, 5.0, 6.0)
    spans.trace()
    assert taken(spans) == []


def test_the_last_spans_are_kept_and_all_of_them_fit_in_an_answer(now):
    spans = Spans(1)
    spans.trace()
    for number in range(MAX_SPANS):
        spans.keep(frame(number), SEND, 0.0, 1.0)
    computed(spans, now, 1.0, 2.0, number=MAX_SPANS)
    packed = spans.take()
    ids = np.frombuffer(packed, np.int64).reshape(-1, len(FIELDS))[:, 0]
    assert ids.tolist() == [*range(2, MAX_SPANS), MAX_SPANS, MAX_SPANS]
    _, total = encode(Frame(1, [Entry(SPANS, 0, 0, 0)], notes={0: {"answer": packed}}))
    assert total <= MAX_HEAD_BYTES


def test_all_processes_of_a_machine_have_one_clock():
    program = "from memra_pp.stage.spans import clock; print(*clock().values())"
    before = clock()
    ns, of = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    after = clock()
    assert before["of"] == of == after["of"] and before["ns"] < int(ns) < after["ns"]


def test_a_machine_that_does_not_tell_its_start_has_a_clock_of_its_own(monkeypatch):
    def unreadable(path):
        raise PermissionError(path)

    monkeypatch.setattr(spans_module.Path, "read_text", unreadable)
    spans_module._boot_id.cache_clear()
    try:
        assert clock()["of"] is None
    finally:
        spans_module._boot_id.cache_clear()
