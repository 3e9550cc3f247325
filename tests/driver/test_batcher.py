"""`Batcher`: what goes into the next micro-batch, over a pipeline that is simulated to the microsecond."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memra_pp.driver.batcher import LEAST_PIECE, MOST_GRACE_S, PIECE_S, SLOWED, WHOLE_PIECE, Batcher
from memra_pp.driver.work import Work
from memra_pp.stage.frames import CLOSE, OPEN, STEP, Entry

MAX_ROWS, MAX_BYTES = 64, 1000


def work(session: int, rows: int = 1, op: int = STEP, logits: int = 1, **options) -> Work:
    return Work(Entry(op, session, 1, 1, rows=rows, logits=logits), [], 10.0, **options)


def sessions(batch: list[Work]) -> list[int]:
    return [w.entry.session for w in batch]


def batcher(stages: int = 2) -> Batcher:
    return Batcher(stages, MAX_ROWS, MAX_BYTES)


def fill(b: Batcher, works: list[Work], now: float = 0.0) -> None:
    for w in works:
        b.add(w, now)


def test_sessions_that_decode_are_spread_evenly_over_as_many_micro_batches_as_stages():
    b = batcher(stages=3)
    fill(b, [work(s) for s in range(8)])
    assert [sessions(b.take(0.0)) for _ in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7], []]


def test_no_more_micro_batches_are_on_their_way_than_there_are_stages_and_control_does_not_count():
    b = batcher(stages=2)
    fill(b, [work(1), work(2), work(3), work(4)])
    first, second = b.take(0.0), b.take(0.0)
    assert len(first) == len(second) == 2
    fill(b, [work(5), work(9, 0, OPEN), work(8, 0, CLOSE)])
    assert sessions(b.take(0.0)) == [9, 8] and b.take(0.0) == []
    b.back(first, 0.01, 0.0)
    assert sessions(b.take(1.0)) == [5]


def test_rows_and_bytes_of_a_micro_batch_are_bounded_and_the_first_entry_always_goes():
    b = batcher(stages=1)
    fill(b, [work(1, 40), work(2, 40), work(3, 10), work(4, 10, n_bytes=MAX_BYTES + 1), work(5, n_bytes=1)])
    for expected in ([1, 3, 5], [2], [4]):
        batch = b.take(1.0)
        assert sessions(batch) == expected
        b.back(batch, 0.01, 0.0)


def test_an_entry_that_must_be_alone_is():
    """Nothing is on its way with it."""
    b = batcher(stages=3)
    fill(b, [work(1), work(2, alone=True), work(3)])
    for session in (1, 2, 3):
        batch = b.take(0.0)
        assert sessions(batch) == [session] and (session == 3 or b.take(0.0) == [])
        b.back(batch, 0.01, 0.0)


def test_what_was_withdrawn_is_not_sent():
    b = batcher(stages=1)
    gone = work(1)
    fill(b, [gone, work(2), work(3, 20, prefill=True)])
    gone.cancel()
    assert 1 not in sessions(b.take(0.0)) and len(b.clear()) <= 1


def test_sessions_just_answered_are_waited_for_a_moment_so_that_they_stay_together():
    b = batcher(stages=1)
    fill(b, [work(1), work(2)])
    batch = b.take(0.0)
    b.back(batch, 0.008, 1.0)
    b.add(work(1), 1.0001)
    assert b.take(1.0001) == [] and 0 < b.held_s(1.0001) <= 0.002
    b.add(work(2), 1.0002)
    assert b.held_s(1.0002) is None and sessions(b.take(1.0002)) == [1, 2]


def test_a_session_that_is_slow_to_come_back_is_not_waited_for_again_until_it_is_quick():
    b = batcher(stages=1)
    now, quick, slow = 1.0, 1, 2
    for turn in range(3):
        fill(b, [work(quick), work(slow)], now)
        batch = b.take(now)
        assert sessions(batch) == [quick, slow]
        b.back(batch, 0.008, now)
        b.add(work(quick), now)
        if turn == 0:
            assert b.take(now) == []  # the slow one is expected
        now += MOST_GRACE_S
        alone = b.take(now if turn == 0 else now - MOST_GRACE_S)
        assert sessions(alone) == [quick]
        b.back(alone, 0.008, now)
        now += 1.0


def test_a_closed_session_is_not_waited_for():
    b = batcher(stages=1)
    fill(b, [work(1), work(2)])
    b.back(b.take(0.0), 0.008, 1.0)
    fill(b, [work(1), work(2, 0, CLOSE)], 1.0)
    assert sessions(b.take(1.0)) == [2] and sessions(b.take(1.0)) == [1]


def test_a_short_piece_rides_with_decodes_and_a_long_one_waits_for_one_micro_batch_at_most():
    b = batcher(stages=2)
    fill(b, [work(1), work(9, LEAST_PIECE, prefill=True, logits=0)])
    decode = b.take(0.0)
    assert sessions(decode) == [1]  # how long it takes is not known yet
    b.back(decode, 0.010, 0.0)
    fill(b, [work(2)])
    assert sessions(b.take(1.0)) == [2, 9]
    b = batcher(stages=2)
    fill(b, [work(1), work(9, MAX_ROWS, prefill=True, logits=0)])
    assert [sessions(b.take(0.0)) for _ in range(2)] == [[1], [9]]


@pytest.mark.parametrize("rows", [MAX_ROWS, MAX_ROWS - 1])
def test_a_piece_that_is_short_but_leaves_no_room_for_decodes_goes_by_itself(rows):
    b = batcher(stages=1)
    b.add(work(9, 16, prefill=True, logits=0), 0.0)
    b.back(b.take(0.0), 0.001, 0.0)
    b.add(work(9, rows, prefill=True, logits=0), 0.0)
    sent = []
    for turn in range(6):
        fill(b, [work(1), work(2)], float(turn))
        sent.append(b.take(float(turn)))
        b.back(sent[-1], 0.010, float(turn))
    assert [9] in [sessions(batch) for batch in sent]


def test_pieces_of_several_prompts_are_spread_and_packed():
    b = batcher(stages=2)
    fill(b, [work(s, 16, prefill=True) for s in range(4)])
    assert [sessions(b.take(0.0)) for _ in range(2)] == [[0, 1], [2, 3]]


def test_a_piece_more_than_there_are_stages_is_on_its_way_while_nobody_decodes():
    b = batcher(stages=2)
    pieces = [work(s, 30, prefill=True, logits=0) for s in range(8)]
    fill(b, pieces[:6])
    assert [len(b.take(0.0)) for _ in range(4)] == [2, 2, 2, 0]
    b = batcher(stages=2)
    fill(b, [work(9), *pieces[:6]])
    sent = [b.take(0.0) for _ in range(3)]
    assert list(map(sessions, sent)) == [[9], [0], []]  # one is decoding
    b.back(sent[0], 0.01, 0.0)
    assert [len(b.take(1.0)) for _ in range(3)] == [2, 2, 0]  # it does not come back


def test_pieces_are_packed_into_what_takes_a_stage_a_while_not_more():
    b = Batcher(2, 512, MAX_BYTES)
    fill(b, [work(s, 100, prefill=True, logits=0) for s in range(8)])
    first = b.take(0.0)
    assert len(first) == 1  # 128 rows, as long as nothing is known
    b.back(first, 100 * PIECE_S / 250, 0.0)
    assert len(b.take(0.0)) == 2


def test_one_stage_takes_as_much_of_prompts_at_a_time_as_it_may():
    b = Batcher(1, 512, MAX_BYTES)
    assert b.piece_rows(600) == 300 and b.piece_rows(512) == 512
    fill(b, [work(s, 100, prefill=True, logits=0) for s in range(8)])
    assert len(b.take(0.0)) == 5


def test_prompts_that_keep_all_stages_busy_are_cut_into_even_pieces():
    b = Batcher(2, 512, MAX_BYTES)
    assert b.piece_rows(512) == 128 and b.piece_rows(100) == WHOLE_PIECE / 2 - 14  # by itself: the sooner it is through
    fill(b, [work(s, 100, prefill=True, logits=0) for s in range(2)])
    assert [b.piece_rows(rows) for rows in (512, 384, 300, 140, 128, 9)] == [128, 128, 100, 70, 128, 9]


def test_pieces_of_one_prompt_follow_each_other_and_none_overtakes():
    b = batcher(stages=3)
    pieces = [work(1, rows, prefill=True, logits=0) for rows in (40, 40, 8)]
    fill(b, [*pieces[:2], work(2, 20, prefill=True), pieces[2]])
    sent = [b.take(0.0) for _ in range(3)]
    b.back(sent[0], 0.01, 0.0)
    sent.append(b.take(0.0))
    assert [w for batch in sent for w in batch if w in pieces] == pieces
    assert all(sum(w in pieces for w in batch) <= 1 for batch in sent)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_pieces_shrink_while_others_decode_and_grow_again(stages):
    b = batcher(stages)
    b = Batcher(stages, 4096, MAX_BYTES)
    alone = b.piece_rows(100_000)
    b.add(work(1), 0.0)
    decode = b.take(0.0)
    assert b.piece_rows(100_000) == 2 * LEAST_PIECE <= alone
    b.back(decode, 0.010, 0.0)
    b.add(work(2, 64, prefill=True, logits=0), 1.0)
    b.back(b.take(1.0), 0.064, 1.0)  # a millisecond a row
    b.add(work(1), 2.0)
    assert b.piece_rows(100_000) == pytest.approx((SLOWED - 1) * 0.010 / 0.001, abs=LEAST_PIECE)
    b.back(b.take(2.0), 0.010, 2.0)
    assert b.piece_rows(100_000) >= 25 and b.piece_rows(3) == 3


class Simulation:
    """Sessions over stages that take a known time a micro-batch, times their `pace` each: what each was answered, and when."""

    def __init__(self, stages: int, base_s: float, row_s: float, pace: Callable[[], float] = lambda: 1.0) -> None:
        self.b = Batcher(stages, 512, 1 << 30)
        self.free = [0.0] * stages
        self.base_s, self.row_s, self.pace = base_s, row_s, pace
        self.busy_s = 0.0
        self.now = 0.0
        self.flying: list[tuple[float, list[Work], float]] = []
        self.answers: dict[int, list[float]] = defaultdict(list)
        self.passed: dict[int, int] = {}
        self.most_passed = 0

    def submit(self, w: Work) -> None:
        self.b.add(w, self.now)
        if not w.prefill:
            self.passed[w.entry.session] = 0

    def send(self) -> None:
        while batch := self.b.take(self.now):
            took = self.base_s + self.row_s * sum(w.entry.rows for w in batch)
            at, slowest = self.now, 0.0
            for stage in range(len(self.free)):
                here = took * self.pace()
                at = self.free[stage] = max(at, self.free[stage]) + here
                slowest, self.busy_s = max(slowest, here), self.busy_s + here
            self.flying.append((at, batch, slowest))
            mine = {w.entry.session for w in batch}
            if any(w.prefill for w in batch):
                for session in self.passed:
                    if session not in mine:
                        self.passed[session] += 1
            for session in mine:
                self.passed.pop(session, None)
            self.most_passed = max([self.most_passed, *self.passed.values()])

    def advance(self) -> list[Work]:
        """To the next frame that comes back, or the end of a hold."""
        self.send()
        held = self.b.held_s(self.now)
        due = min((at for at, _, _ in self.flying), default=float("inf"))
        if held is not None and self.now + held < due:
            self.now += held + 1e-6
            return []
        self.flying.sort(key=lambda flight: flight[0])
        self.now, batch, took = self.flying.pop(0)
        self.b.back(batch, took, self.now)
        for w in batch:
            self.answers[w.entry.session].append(self.now)
        return batch


@given(
    stages=st.integers(1, 4),
    decodes=st.integers(1, 6),
    prompts=st.lists(st.integers(1, 2000), max_size=3),
    row_ms=st.floats(0.005, 2.0),
)
@settings(max_examples=60, deadline=None)
def test_no_decode_sees_more_than_one_piece_go_before_it_and_everything_gets_there(stages, decodes, prompts, row_ms):
    sim = Simulation(stages, base_s=0.010, row_s=row_ms / 1e3)
    left = {100 + i: rows for i, rows in enumerate(prompts)}
    window = defaultdict(int)

    def feed() -> None:
        for session in left:
            while left[session] and window[session] < stages:
                n = sim.b.piece_rows(left[session])
                left[session] -= n
                window[session] += 1
                sim.submit(work(session, n, prefill=True, logits=int(not left[session])))

    for session in range(decodes):
        sim.submit(work(session))
    feed()
    for _ in range(4000):
        for w in sim.advance():
            if w.prefill:
                window[w.entry.session] -= 1
            elif len(sim.answers[w.entry.session]) < 400:
                sim.submit(work(w.entry.session))
        feed()
        if not sim.flying and not any(left.values()) and all(len(sim.answers[s]) >= 400 for s in range(decodes)):
            break
    else:
        raise AssertionError("somebody starved")
    assert sim.most_passed <= 1


def test_decodes_beside_a_long_prefill_wait_for_one_piece_that_has_shrunk():
    """The gap between two tokens, once the pieces have adapted, against the gap without a prefill."""
    stages, row_s = 2, 0.001
    sim = Simulation(stages, base_s=0.010, row_s=row_s)
    for session in range(4):
        sim.submit(work(session))
    left, window = 20_000, 0
    for _ in range(300):
        while left and window < stages:
            n = sim.b.piece_rows(left)
            left, window = left - n, window + 1
            sim.submit(work(99, n, prefill=True, logits=0))
        for w in sim.advance():
            if w.prefill:
                window -= 1
            else:
                sim.submit(work(w.entry.session))
    gaps = [b - a for s in range(4) for a, b in zip(sim.answers[s][20:], sim.answers[s][21:], strict=False)]
    quiet = stages * (0.010 + 2 * row_s)
    assert left < 20_000 - 1000 and max(gaps) <= 1.1 * SLOWED * quiet + 2 * LEAST_PIECE * row_s


def test_prompts_keep_every_stage_busy_though_no_two_pieces_take_the_same_time():
    """Of 32 prompts of 512 rows, four at a time."""
    stages, prompts, row_s, rng = 2, 32, 0.0002, random.Random(0)
    sim = Simulation(stages, base_s=0.002, row_s=row_s, pace=lambda: rng.lognormvariate(0, 0.15))
    waiting, left, window = [*range(prompts)], dict[int, int](), Counter[int]()
    while waiting or sim.flying or left:
        while waiting and len(left) < 4:
            left[waiting.pop()] = 512
        for session, rows in left.items():
            while rows and window[session] <= stages:
                n = sim.b.piece_rows(rows)
                rows = left[session] = rows - n
                window[session] += 1
                sim.submit(work(session, n, prefill=True, logits=int(not rows)))
        for w in sim.advance():
            window[w.entry.session] -= 1
            if w.entry.logits:
                del left[w.entry.session]
    assert sim.busy_s / (stages * sim.now) > 0.93
