"""Rollbacks, snapshots, drops and kept states on a stage: in order or not at all, whatever comes again, late or bad."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_stage import FENCE, asking, expected_logits, frame, opening, step, tokens, worker

import memra_pp
from memra_pp.cache import KvPolicy
from memra_pp.stage.frames import CLOSE, OPEN, RESET, STEP, Entry, Frame
from memra_pp.stage.session import StageSession
from memra_pp.stage.worker import StageWorker

IDS = np.random.default_rng(3).integers(0, 200, 60).tolist()


def image(session: StageSession | None) -> Any:
    """Everything of a session that an entry may change."""
    if session is None:
        return None
    cache = session.cache
    layers = [layer for layer in (*cache.kv, *cache.recur) if layer is not None]
    slots = [(s.pos, s.lens, [(digest(c.conv), digest(c.ssm)) for c in s.states.values()]) for s in session.slots]
    kv = [(layer.len, layer.base) for layer in cache.kv if layer is not None]
    return cache.pos, kv, marks(session), slots, [digest(buffer) for layer in layers for buffer in layer.buffers()]


def digest(buffer: np.ndarray) -> str:
    return hashlib.sha256(buffer).hexdigest()[:12]


def marks(session: StageSession) -> list[tuple[int, int, bool]]:
    """The live snapshots, oldest first: slot, row, pin."""
    live = session.cache.plan.live
    return [(i, m.pos, m.pin) for m in live for i, s in enumerate(session.slots) if s.mark is m]


def numbers(w: StageWorker, session: int) -> Any:
    s = w.sessions.get(session)
    return None if s is None else (s.seq, s.fault, s.broken)


class Tape:
    """Every frame as it came to every stage. `around(stage, frame, before)` is called before and after it is applied."""

    def __init__(self, pipe: memra_pp.Pipeline, around: Any = None) -> None:
        self.frames: list[list[Frame]] = []
        workers = pipe.chain._workers

        def send(sent: Frame) -> None:
            self.frames.append([])
            for i, w in enumerate(workers):
                if around is not None:
                    around(i, w, sent, True)
                self.frames[-1].append(copy.deepcopy(sent))
                w.apply(sent)
                if around is not None:
                    around(i, w, sent, False)
            pipe.chain._back.append(sent)

        pipe.chain._send = send


def play(pipe: memra_pp.Pipeline, mode: Any) -> list[np.ndarray]:
    """Every kind of step there is, beside another session; the rows answered."""
    rows = []
    with pipe.open(IDS[:12], max_new_tokens=40, speculate=4, snapshots=2, recurrent=mode) as s:
        with pipe.open(IDS[:5], max_new_tokens=9) as other:
            rows += [s.prefill(), other.prefill()]
            first = s.snapshot()
            rows += [*s.verify(IDS[12:17])]
            second = s.snapshot(pin=False)
            rows.append(s.extend(IDS[17:20]))
            s.rollback(second, 2)
            rows.append(s.decode(IDS[19]))
            second.close()
            rows += [*s.round(IDS[20:24], next=1).rows, other.decode(1)]
            rows += [*s.round(IDS[24:28]).rows]
            s.rollback(first, 3)
            rows += [*s.verify(IDS[28:31])]
            rows.append(other.decode(2))
        first.close()
        rows.append(s.decode(3))
        with s.snapshot():
            rows += [*s.round(IDS[28:31], next=4).rows]
    return rows


@pytest.fixture(params=["hybrid", "gemma3_tiny"])
def pipe(request: pytest.FixtureRequest, data: Path) -> Iterator[memra_pp.Pipeline]:
    policy = KvPolicy.from_env({"MEMRA_SWA_RING": "all"})
    with memra_pp.launch(data / request.param, stages=3, backend="local", policy=policy, threads=1) as pipe:
        yield pipe
        assert all(stage["allocated_bytes"] == 0 for stage in pipe.stats()["stages"])


@pytest.mark.parametrize("mode", ["replay", "states"])
def test_what_comes_again_has_no_effect(pipe: memra_pp.Pipeline, mode: Any) -> None:
    """After every frame, every frame there was comes again to every stage: the last is answered, the others are refused."""
    expected = play(pipe, mode)
    answered = refused = 0

    def again(stage: int, w: StageWorker, sent: Frame, before: bool) -> None:
        nonlocal answered, refused
        if before:
            return
        for old in reversed(tape.frames):
            if len(old) <= stage:
                continue
            repeat = copy.deepcopy(old[stage])
            entry = repeat.entries[0]
            held = image(w.sessions.get(entry.session)), numbers(w, entry.session)
            last = entry.op == STEP and entry.session in w.sessions and entry.seq == w.sessions[entry.session].seq - 1
            w.apply(repeat)
            assert (image(w.sessions.get(entry.session)), numbers(w, entry.session)) == held
            assert repeat.entries[0].rows == 0 and not repeat.arrays
            assert repeat.fault(0) is None if last else repeat.fault(0)[:2] == [stage, "StageError"]
            answered, refused = answered + last, refused + (not last)

    tape = Tape(pipe, again)
    assert [row.tolist() for row in play(pipe, mode)] == [row.tolist() for row in expected]
    assert answered > 3 * 10 and refused > 3 * 100


ASKEW = {
    "another epoch": lambda e: e._replace(epoch=e.epoch + 1),
    "an epoch of before": lambda e: e._replace(epoch=0),
    "a seq to come": lambda e: e._replace(seq=e.seq + 1),
    "a seq past": lambda e: e._replace(seq=max(0, e.seq - 2)),
    "a row further": lambda e: e._replace(base_len=e.base_len + 1),
    "no rollback": lambda e: e._replace(restore=0) if e.restore else e._replace(base_len=e.base_len + 7),
    "another rollback": lambda e: e._replace(restore=31, accept=1),
    "another session": lambda e: e._replace(session=99),
}


@pytest.mark.parametrize("mode", ["replay", "states"])
@pytest.mark.parametrize("change", ASKEW.values(), ids=list(ASKEW))
def test_what_is_not_in_turn_has_no_effect(pipe: memra_pp.Pipeline, change: Any, mode: Any) -> None:
    """Before every step comes one that is askew."""
    expected, tried = play(pipe, mode), 0

    def askew(stage: int, w: StageWorker, sent: Frame, before: bool) -> None:
        nonlocal tried
        entry = sent.entries[0]
        bad = change(entry)
        stays = bad.restore == 0 < entry.restore and w.sessions[entry.session].cache.pos == entry.base_len
        if not before or entry.op != STEP or stays:
            return
        tried += 1
        held = image(w.sessions[entry.session]), numbers(w, entry.session)
        other = Frame(sent.id, [bad], [np.array(a) for a in sent.arrays])
        w.apply(other)
        assert (image(w.sessions[entry.session]), numbers(w, entry.session)) == held
        assert other.fault(0)[:2] == [stage, "StageError"] and not other.arrays

    Tape(pipe, askew)
    assert [row.tolist() for row in play(pipe, mode)] == [row.tolist() for row in expected]
    assert tried > 3 * 12


NUMBERS = itertools.count(1000)


class Recorded:
    """A session as a stage saw it: its steps as they came, the note that opened it, and what it held after them."""

    def __init__(self, w: StageWorker, note: dict[str, Any]) -> None:
        self.w = w
        self.note = note | {"offsets": [1 << 26] * w.spec.stages, "held": []}
        self.steps: list[Frame] = []
        self.final: Any = None


@pytest.fixture(scope="module")
def recorded(data: Path) -> Iterator[dict[tuple[str, int], Recorded]]:
    """Of each mode, and each of three stages."""
    with memra_pp.launch(data / "hybrid", stages=3, backend="local", threads=1) as pipe:
        found = {}
        for mode, number in (("replay", 1), ("states", 3)):

            def note(i: int, w: StageWorker, sent: Frame, before: bool, mode: str = mode, number: int = number) -> None:
                op, session = sent.entries[0][:2]
                if session == number and op == OPEN and before:
                    found[mode, i] = Recorded(w, sent.notes[0])
                elif session == number and op == STEP:
                    if before:
                        found[mode, i].steps.append(copy.deepcopy(sent))
                    found[mode, i].final = image(w.sessions[number])

            Tape(pipe, note)
            play(pipe, mode)
        yield found


@given(order=st.lists(st.integers(-9, 9), max_size=60), stage=st.integers(0, 2), mode=st.sampled_from(["replay", "states"]))
@settings(max_examples=40, deadline=None)
def test_in_any_order_only_the_next_step_is_applied(recorded: Any, order: list[int], stage: int, mode: str) -> None:
    """`order` is how far ahead of its turn each step comes; then those that are left come in turn."""
    given_steps = recorded[mode, stage]
    w, steps, number, done = given_steps.w, given_steps.steps, next(NUMBERS), 0
    w.apply(said := Frame(next(NUMBERS), [opening(number)], [], {0: given_steps.note | {"held": []}}))
    assert said.fault(0) is None and len(steps) == 10
    for ahead in itertools.chain(order, itertools.repeat(0)):
        if done == len(steps):
            break
        at = min(max(0, done + ahead), len(steps) - 1)
        sent, session = copy.deepcopy(steps[at]), w.sessions[number]
        sent.entries[0] = sent.entries[0]._replace(session=number)
        held = image(session)
        w.apply(sent)
        if at == done:
            done += 1
            assert sent.fault(0) is None and session.seq == 1 + done
        else:
            assert image(session) == held and (sent.fault(0) is None) == (at == done - 1)
    assert image(w.sessions[number]) == given_steps.final
    w.apply(Frame(next(NUMBERS), [Entry(CLOSE, number, 0, 1)]))
    assert w.device.allocated_bytes == 0


def test_a_late_reset_is_refused(pipe: memra_pp.Pipeline) -> None:
    """Late: behind a newer frame. A reset that is new but of a step long past is, too."""
    tape = Tape(pipe)
    with pipe.open(IDS[:12], max_new_tokens=40) as s:
        s.prefill()
        books = s._calls.books
        pipe.run(s._calls._steps._restart(SimpleNamespace(stood=books.plan.pos, held=tuple(books.slots))))
        reset = tape.frames[-1]
        assert reset[0].entries[0].op == RESET
        row, newest = s.decode(IDS[12]), next(pipe.scheduler._ids)
        for i, w in enumerate(pipe.chain._workers):  # type: ignore[attr-defined]
            held = image(w.sessions[s.id]), numbers(w, s.id)
            for number, says in ((reset[i].id, "late or a repeat"), (newest, "further on")):
                late = copy.deepcopy(reset[i])
                late.id = number
                w.apply(late)
                assert late.fault(0)[:2] == [i, "StageError"] and says in late.fault(0)[2]
                assert (image(w.sessions[s.id]), numbers(w, s.id)) == held
        with pipe.open(IDS[:13], max_new_tokens=9) as other:
            np.testing.assert_array_equal(row, other.prefill())


class Stages:
    """Two toy stages with recurrent state on the first, and a session of two snapshots and two kept states."""

    def __init__(self) -> None:
        self.workers = [worker(s) for s in range(len(FENCE) - 1)]
        shape = {"snapshots": 2, "recurrent": "states", "speculate": 2}
        self.send(opening(1), opening(2), notes={0: asking(**shape)})

    def send(self, *entries: Entry, rows: int = 0, notes: Any = None) -> Frame:
        sent = frame(*entries, arrays=tokens(*range(1, 1 + rows)) if rows else (), notes=notes)
        for w in self.workers:
            w.apply(sent)
        return sent

    def step(self, seq: int, base: int, rows: int, **fields: int) -> list[Any] | None:
        """The fault of a step of session 1; the other session's step in the same frame is never touched."""
        stood = self.workers[0].sessions[2]
        beside = step(2, stood.seq, stood.cache.pos, 1, "last")
        reply = self.send(step(1, seq, base, rows, **fields), beside, rows=rows + 1)
        assert reply.fault(1) is None and np.array_equal(reply.arrays[-1], expected_logits([rows + 1]))
        if reply.fault(0) is not None:
            assert reply.entries[0].rows == 0
        return reply.fault(0)

    def sessions(self) -> list[StageSession]:
        return [w.sessions[1] for w in self.workers]

    def images(self) -> list[Any]:
        return [image(s) for s in self.sessions()]

    def close(self) -> None:
        for w in self.workers:
            w.close()
            assert w.device.allocated_bytes == 0


@pytest.fixture
def stages() -> Iterator[Stages]:
    """Session 1 stands at row 4, seq 3, with a pinned snapshot of row 2 in slot 0."""
    made = Stages()
    assert made.step(1, 0, 2, snapshot=1, snapshot_at=2, pin=1) is None
    assert made.step(2, 2, 2) is None
    yield made
    made.close()


HUGE = 2**62
BAD = {
    "more accepted than fed": (2, {"restore": 1, "accept": 3}),
    "endless accepted": (2, {"restore": 1, "accept": HUGE}),
    "a snapshot in a slot for kept states": (4, {"snapshot": 3}),
    "a snapshot in no slot": (4, {"snapshot": HUGE}),
    "a snapshot behind the rows": (4, {"snapshot": 2, "snapshot_at": 2}),
    "a snapshot far behind the rows": (4, {"snapshot": 2, "snapshot_at": HUGE}),
    "as many kept as rows": (4, {"keep": 1}),
    "more kept than slots": (4, {"keep": 3, "rows": 5}),
    "endless kept": (4, {"keep": HUGE}),
    "a drop of a kept state": (4, {"drop": 0b101}),
    "a drop of no slot": (4, {"drop": HUGE}),
    "a good rollback and a bad drop": (2, {"restore": 1, "drop": 4}),
    "a good rollback and a bad snapshot": (2, {"restore": 1, "accept": 1, "snapshot": 1, "snapshot_at": 9}),
    "a good rollback and rows past the context": (2, {"restore": 1, "drop": 1, "rows": 15}),
    "more accepted than fed, without rows": (2, {"restore": 1, "accept": 3, "drop": 1, "snapshot": 2, "rows": 0}),
}


@pytest.mark.parametrize(("base", "fields"), BAD.values(), ids=list(BAD))
def test_a_malformed_step_faults_alone_and_takes_its_turn(stages: Stages, base: int, fields: dict[str, int]) -> None:
    held = stages.images()
    rows = fields.get("rows", 1)
    fault = stages.step(3, base, rows, **{k: v for k, v in fields.items() if k != "rows"})
    assert fault[0] == 0 and fault[1] in ("StageError", "CacheError", "CapacityExceeded")
    assert stages.images() == held and {s.seq for s in stages.sessions()} == {4}
    assert stages.step(4, 2, 1, restore=1) is None
    assert {s.cache.pos for s in stages.sessions()} == {3}


NOT_THERE = {
    "a snapshot that is not live": (2, {"restore": 2}),
    "a kept state that is not live": (2, {"restore": 3}),
    "a slot that is not there": (2, {"restore": 5}),
    "a slot past all": (2, {"restore": HUGE, "accept": HUGE}),
    "a row that is not the snapshot's": (3, {"restore": 1, "accept": 1}),
    "the row where the session stands": (4, {"restore": 1}),
}


@pytest.mark.parametrize(("base", "fields"), NOT_THERE.values(), ids=list(NOT_THERE))
def test_a_rollback_to_what_is_not_there_is_refused(stages: Stages, base: int, fields: dict[str, int]) -> None:
    held = stages.images()
    fault = stages.step(3, base, 1, **fields)
    assert fault[:2] == [0, "StageError"] and "seq 3" in fault[2]
    assert stages.images() == held and {s.seq for s in stages.sessions()} == {3}
    assert stages.step(3, 4, 1) is None


def test_rows_fit_that_fit_after_the_rollback(stages: Stages) -> None:
    assert stages.step(3, 2, 14, restore=1) is None
    assert {s.cache.pos for s in stages.sessions()} == {16}
    assert stages.step(4, 2, 14, restore=1, drop=1) is None
    assert [marks(s) for s in stages.sessions()] == [[]] * 2 and {s.cache.pos for s in stages.sessions()} == {16}


def test_a_step_without_rows_goes_back_drops_and_takes(stages: Stages) -> None:
    assert stages.step(3, 2, 0, restore=1, drop=1, snapshot=2, pin=1) is None
    assert [marks(s) for s in stages.sessions()] == [[(1, 2, True)]] * 2 and {s.cache.pos for s in stages.sessions()} == {2}
    assert stages.step(4, 2, 1) is None
    assert stages.step(5, 2, 0, restore=2, snapshot=1) is None
    assert [marks(s) for s in stages.sessions()] == [[(1, 2, True), (0, 2, False)]] * 2


def test_one_step_goes_back_drops_takes_and_keeps(stages: Stages) -> None:
    assert stages.step(3, 4, 1, snapshot=2, snapshot_at=0) is None
    assert [marks(s) for s in stages.sessions()] == [[(0, 2, True), (1, 4, False)]] * 2
    assert stages.step(4, 4, 3, restore=2, drop=1, snapshot=1, snapshot_at=3, pin=1, keep=2) is None
    assert [marks(s) for s in stages.sessions()] == [[(1, 4, False), (2, 5, False), (3, 6, False), (0, 7, True)]] * 2
    assert stages.step(5, 5, 1, restore=3, drop=0b11) is None
    assert [marks(s) for s in stages.sessions()] == [[(2, 5, False)]] * 2
    assert {s.cache.pos for s in stages.sessions()} == {6}


fields = st.fixed_dictionaries(
    {"rows": st.integers(0, 4)},
    optional={
        "restore": st.integers(0, 6), "accept": st.integers(0, 3), "drop": st.integers(0, 4), "snapshot": st.integers(0, 3),
        "snapshot_at": st.integers(0, 4), "pin": st.integers(0, 1), "keep": st.integers(0, 3),
    },
)  # fmt: skip


@given(st.lists(fields, max_size=14))
@settings(max_examples=300, deadline=None)
def test_any_steps_do_what_their_fields_say_or_nothing(sequence: list[dict[str, int]]) -> None:
    stages = Stages()
    seq, pos, live = 1, 0, []
    for given_fields in sequence:
        e = Entry(STEP, 1, seq, 1)._replace(**given_fields)
        at = next((i for i, mark in enumerate(live) if mark[0] == e.restore - 1), None)
        base = pos if e.restore == 0 else 0 if at is None else live[at][1]
        left = live if e.restore == 0 or at is None else live[: at + 1]
        there = e.restore == 0 or at is not None
        slots = e.drop < 4 and e.snapshot <= 2 and e.snapshot_at <= e.rows and e.keep <= 2 and e.keep < max(1, e.rows)
        good = there and (slots or not (e.restore or e.drop or e.snapshot or e.keep)) and base + e.rows <= 16
        good = good and e.accept * (e.restore > 0) <= pos - base and (e.rows or e.snapshot or e.restore)
        held = stages.images()
        asked = {name: value for name, value in given_fields.items() if name != "rows"}
        assert (stages.step(seq, base, e.rows, **asked) is None) == bool(good)
        seq += there
        if good:
            new = [(e.snapshot_at, e.snapshot - 1, e.pin > 0)] if e.snapshot else []  # first, so that it outlives its equal
            new += [(e.rows - e.keep + i, 2 + i, False) for i in range(e.keep)]
            taken = [(slot, base + r, pin) for r, slot, pin in sorted(new, key=lambda n: n[0])]
            over = {slot for slot, _, _ in taken}
            live = [m for m in left if not e.drop >> m[0] & 1 and m[0] not in over] + taken
            pos = base + e.rows
        else:
            assert stages.images() == held
        for s in stages.sessions():
            assert (s.seq, s.cache.pos, marks(s)) == (seq, pos, live)
    stages.close()
