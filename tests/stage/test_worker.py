"""`StageWorker`: entries in order or refused, hops and tombstones; whatever comes in, no live session is lost."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_stage import (
    ARGS,
    CFG,
    FENCE,
    MAX_CTX,
    N_EMBD,
    N_VOCAB,
    PLACE,
    POLICY,
    asking,
    closing,
    expected_logits,
    frame,
    opening,
    step,
    tokens,
    worker,
)

from memra_pp.admission import MAX_SNAPSHOTS
from memra_pp.cache import slab_bytes, stage_layout
from memra_pp.errors import StageError
from memra_pp.stage.frames import CLOCK, CLOSE, OPEN, OPS, PING, RESET, SPANS, STATS, STEP, STOP, TRACE, Entry
from memra_pp.stage.session import StageSession

STAGES = len(FENCE) - 1


class Stages:
    """A chain of workers in this process, and what is asked of it."""

    def __init__(self):
        self.workers = [worker(s) for s in range(STAGES)]

    def send(self, *entries, arrays=(), notes=None):
        """The frame as it comes back. Every stage has counted itself; steps come back as they were sent, or without rows."""
        sent = frame(*entries, arrays=arrays, notes=notes)
        for hops, w in enumerate(self.workers, start=1):
            w.apply(sent)
            assert sent.hops == hops
        for i, (entry, came) in enumerate(zip(entries, sent.entries, strict=True)):
            assert came._replace(rows=entry.rows) == entry
            assert came.rows == 0 or (came.rows == entry.rows and sent.fault(i) is None)
        return sent

    def open(self, *sessions):
        for session in sessions:
            assert self.send(opening(session)).fault(0) is None

    def heights(self, session):
        """The length of a session on each stage."""
        return [w.sessions[session].cache.pos for w in self.workers]

    def feed(self, session, seq, base_len, *ids, **asked):
        return self.send(step(session, seq, base_len, len(ids), **asked), arrays=tokens(*ids))

    def state(self):
        """Everything of every session that an entry may change."""
        return [{sid: snapshot(s) for sid, s in w.sessions.items()} for w in self.workers]

    def close(self):
        for w in self.workers:
            w.close()


def snapshot(session):
    cache = session.cache
    kv = [(layer.k.tobytes(), layer.v.tobytes(), layer.len, int(layer.len_d[0])) for layer in cache.kv if layer is not None]
    return session.seq, cache.pos, kv


@pytest.fixture
def stages():
    made = Stages()
    yield made
    made.close()
    assert all(w.device.allocated_bytes == 0 for w in made.workers)


def test_steps_give_the_rows_asked_for_and_every_stage_grows_by_its_rows(stages):
    stages.open(1)
    for seq, (base, ids, logits) in enumerate([(0, [3, 4], "none"), (2, [5, 6, 7], "last"), (5, [8, 9], "all")], start=1):
        reply = stages.feed(1, seq, base, *ids, logits=logits)
        assert reply.entries == [step(1, seq, base, len(ids), logits)] and not reply.notes and reply.hops == STAGES
        assert stages.heights(1) == [base + len(ids)] * STAGES
        wanted = {"none": [], "last": ids[-1:], "all": ids}[logits]
        assert len(reply.arrays) == bool(wanted)
        if wanted:
            assert np.array_equal(reply.arrays[0], expected_logits(wanted))


def test_a_stage_counts_the_steps_and_rows_it_ran_and_no_other_frame(stages):
    stages.open(1, 2)
    stages.send(step(1, 1, 0, 2), step(2, 1, 0, 1), arrays=tokens(3, 4, 5))
    stages.feed(1, 2, 2, 6)
    stages.send(closing(2))
    for w in stages.workers:
        stats = w.stats()
        assert (stats["steps"], stats["rows"], stats["faults"], stats["sessions"]) == (2, 4, 0, 1)
        assert stats["busy_s"] > 0 and stats["wait_in_s"] > 0 and stats["wait_out_s"] == 0 and 0 < stats["bubble"] < 1


def test_a_stage_says_what_its_bytes_are_for(stages):
    stages.open(1, 2, 5)
    for session, changes in ((3, {"ctx": 7, "snapshots": 3}), (4, {"snapshots": 0})):
        assert stages.send(opening(session), notes={0: asking(session, **changes)}).fault(0) is None
    stages.send(closing(2))
    for w in stages.workers:
        stats = w.stats()
        assert sum(stats["bytes"].values()) == stats["allocated_bytes"] == w.device.slab_bytes
        held = [a for session in w.sessions.values() for a in w.spec.layout(session.shape)]
        for kind, name in (("k", "k"), ("v", "v"), ("length", "len_d")):
            assert stats["bytes"][kind] == sum(a.bytes for a in held if a.name == name)
    for session in (1, 3, 4, 5):
        stages.send(closing(session))
    assert all(not any(w.stats()["bytes"].values()) for w in stages.workers)


@pytest.mark.parametrize("logits", ["last", "all"])
def test_argmax_crosses_the_lane_as_ids(stages, logits):
    stages.open(1)
    reply = stages.feed(1, 1, 0, 3, 4, logits=logits, want="argmax")
    ids = expected_logits([4] if logits == "last" else [3, 4]).argmax(-1)
    assert reply.arrays[0].dtype == np.int32 and reply.arrays[0].tolist() == ids.tolist()


def test_sessions_that_share_a_frame_get_their_own_answers(stages):
    stages.open(1, 2, 3, 4)
    entries = [step(1, 1, 0, 2, "all"), step(2, 1, 0, 1), step(3, 1, 0, 3, "last", "argmax"), step(4, 1, 0, 1, "last")]
    reply = stages.send(*entries, arrays=tokens(1, 2, 10, 20, 21, 22, 30))
    assert reply.entries == entries and not reply.notes and len(reply.arrays) == 3
    assert [stages.heights(n) for n in (1, 2, 3, 4)] == [[n] * STAGES for n in (2, 1, 3, 1)]
    assert np.array_equal(reply.arrays[0], expected_logits([1, 2]))
    assert reply.arrays[1].tolist() == expected_logits([22]).argmax(-1).tolist()
    assert np.array_equal(reply.arrays[2], expected_logits([30]))


@pytest.mark.parametrize("shape", [{}, {"ctx": 1}, {"snapshots": 3}, {"recurrent": "states", "speculate": 2}])
def test_an_open_is_answered_with_the_bytes_of_the_layout_and_a_close_gives_them_back(stages, shape):
    args = ARGS | shape
    layouts = [
        stage_layout(CFG, FENCE, s, args["ctx"], POLICY, **{k: args[k] for k in args if k != "ctx"}) for s in range(STAGES)
    ]
    planned = [slab_bytes(layout) for layout in layouts]
    note = asking(**shape)
    assert note["charges"] == planned
    said = stages.send(opening(1), notes={0: asking(**shape)}).notes[0]
    assert said == note | {"held": [[n, 0] for n in planned]}
    assert [w.device.allocated_bytes for w in stages.workers] == planned
    for w, layout in zip(stages.workers, layouts, strict=True):
        assert w.sessions[1].slab.allocated_bytes == sum(a.bytes for a in layout)
        assert w.sessions[1].slab.used == w.sessions[1].slab.size
    for _ in range(2):
        assert stages.send(closing(1), notes={0: {"held": []}}).notes[0] == {"held": [[0, 0]] * STAGES}
        assert not stages.send(closing(1)).notes
        assert [w.device.allocated_bytes for w in stages.workers] == [0] * STAGES


def test_an_open_without_room_is_a_fault_and_takes_nothing():
    small = worker(budget_bytes=PLACE + 100)
    reply = frame(opening(1))
    small.apply(reply)
    assert reply.fault(0)[:2] == [0, "CapacityExceeded"] and not small.sessions and reply.notes[0]["held"] == []
    assert small.device.allocated_bytes == 0


QUESTIONS = (PING, STATS, STOP, CLOCK, TRACE, SPANS)
REFUSED = {
    "a second open": (opening(1), ["session 1 is open already"]),
    "an unknown session": (step(9, 1, 0, 1), ["no session 9"]),
    "another epoch": (step(1, 2, 2, 1, epoch=7), ["epoch 7", "epoch 1"]),
    "an open of another epoch": (opening(2, epoch=7), ["epoch 7", "epoch 1"]),
    "a close of another epoch": (closing(1, epoch=0), ["epoch 0", "epoch 1"]),
    "a seq long past": (step(1, 0, 2, 1), ["seq 2", "seq 0"]),
    "a seq to come": (step(1, 3, 2, 1), ["seq 2", "seq 3"]),
    "another base_len": (step(1, 2, 5, 1), ["row 2", "row 5"]),
    "a seq past all": (step(1, 2**63 - 1, 2, 1), ["seq 2", f"seq {2**63 - 1}"]),
    "an op that is none": (step(1, 2, 2, 0)._replace(op=len(OPS)), [f"op {len(OPS)}"]),
    "an op past all": (step(1, 2, 2, 0)._replace(op=2**63 - 1), [f"op {2**63 - 1}"]),
    **{f"a question: {OPS[op]}": (step(1, 2, 2, 0)._replace(op=op), [f"op {op}"]) for op in QUESTIONS},
    "an open with rows": (opening(2)._replace(rows=1), ["1 rows"]),
    "a close with rows": (closing(1)._replace(rows=1), ["1 rows"]),
}


@pytest.mark.parametrize("entry, says", REFUSED.values(), ids=list(REFUSED))
def test_a_refused_entry_names_both_values_and_changes_nothing_on_any_stage(stages, entry, says):
    stages.open(1)
    stages.feed(1, 1, 0, 3, 4)
    before, allocated = stages.state(), [w.device.allocated_bytes for w in stages.workers]
    reply = stages.send(entry, arrays=tokens(5))
    fault = reply.fault(0)
    assert fault[:2] == [0, "StageError"] and reply.entries[0].rows == 0 and not reply.arrays
    assert all(text in fault[2] for text in says)
    assert reply.notes[0].get("held", []) == []
    assert stages.state() == before and [w.device.allocated_bytes for w in stages.workers] == allocated
    assert stages.feed(1, 2, 2, 5).fault(0) is None and stages.heights(1) == [3] * STAGES


MALFORMED_STEPS = {
    "no rows": {"rows": 0},
    "fewer than no rows": {"rows": -3},
    "more rows than the frame": {"rows": 3},
    "endless rows": {"rows": 2**63 - 1},
    "more logits than rows": {"logits": 2},
    "more wanted than there is": {"want": 2 + N_VOCAB},
    "logits past all": {"logits": 2**63 - 1},
    "a want past all": {"want": 2**63 - 1},
}


@pytest.mark.parametrize("change", MALFORMED_STEPS.values(), ids=list(MALFORMED_STEPS))
def test_a_malformed_step_faults_alone_and_takes_its_turn_on_every_stage(stages, change):
    stages.open(1, 2)
    reply = stages.send(step(2, 1, 0, 1, "last"), step(1, 1, 0, 1)._replace(**change), arrays=tokens(7, 8))
    assert reply.fault(0) is None and stages.heights(2) == [1] * STAGES
    assert len(reply.arrays) == 1 and np.array_equal(reply.arrays[0], expected_logits([7]))
    assert reply.fault(1)[0] == 0
    assert {w.sessions[1].seq for w in stages.workers} == {2} and stages.heights(1) == [0] * STAGES
    assert stages.feed(1, 2, 0, 5).fault(0) is None and stages.heights(1) == [1] * STAGES


def test_a_step_past_the_context_is_refused_before_the_model_sees_it(stages):
    stages.open(1, 2)
    reply = stages.send(step(1, 1, 0, 17), step(2, 1, 0, 1), arrays=tokens(*range(18)))
    assert reply.fault(0)[1] == "CapacityExceeded"
    assert reply.fault(1) is None and stages.heights(2) == [1] * STAGES


@pytest.mark.parametrize("at", range(STAGES + 1))
def test_a_repeat_is_answered_without_a_fault_and_applies_nothing(stages, at):
    """`at` stages have seen the entry twice: the first ones, as when a lane broke behind them."""
    stages.open(1)
    stages.feed(1, 1, 0, 3, 4)
    before = stages.state()
    for w in stages.workers[:at]:
        again = frame(step(1, 1, 0, 2, "last"), arrays=tokens(3, 4))
        w.apply(again)
        assert again.entries == [step(1, 1, 0, 0, "last")] and not again.notes and not again.arrays and again.hops == 1
    reply = stages.feed(1, 1, 0, 3, 4, logits="last")
    assert reply.entries[0].rows == 0 and not reply.notes and not reply.arrays and reply.hops == STAGES
    assert stages.state() == before


def test_a_repeat_beside_other_steps_does_not_move_their_rows(stages):
    stages.open(1, 2)
    stages.feed(1, 1, 0, 3, 4)
    reply = stages.send(step(1, 1, 0, 2, "last"), step(2, 1, 0, 1, "last"), arrays=tokens(3, 4, 9))
    assert not reply.notes and [e.rows for e in reply.entries] == [0, 1]
    assert len(reply.arrays) == 1 and np.array_equal(reply.arrays[0], expected_logits([9]))
    assert (stages.heights(1), stages.heights(2)) == ([2] * STAGES, [1] * STAGES)


def test_a_session_has_one_step_a_frame(stages):
    stages.open(1, 2)
    twice = stages.send(step(1, 1, 0, 1), step(1, 1, 0, 1), step(2, 1, 0, 1, "last"), arrays=tokens(3, 4, 5))
    assert [bool(twice.fault(i)) for i in range(3)] == [False, True, False] and "already" in twice.fault(1)[2]
    assert len(twice.arrays) == 1 and np.array_equal(twice.arrays[0], expected_logits([5]))
    closed = stages.send(step(1, 2, 1, 1), closing(1), step(2, 2, 1, 1), arrays=tokens(3, 4))
    assert [bool(closed.fault(i)) for i in range(3)] == [False, True, False] and "already" in closed.fault(1)[2]
    assert stages.feed(1, 3, 2, 5).fault(0) is None and stages.heights(1) == [3] * STAGES


def test_the_next_step_of_a_session_waits_for_the_next_frame(stages):
    """A second step at the same rows is refused, be it numbered as the first or after it: only one may write them."""
    stages.open(1, 2)
    both = stages.send(step(1, 1, 0, 1), step(1, 2, 0, 1), step(2, 1, 0, 1), arrays=tokens(3, 4, 5))
    assert [bool(both.fault(i)) for i in range(3)] == [False, True, False] and "already" in both.fault(1)[2]
    assert stages.heights(1) == stages.heights(2) == [1] * STAGES
    assert len({w.sessions[1].seq for w in stages.workers}) == 1


def test_one_frame_may_open_step_and_close_in_turn(stages):
    reply = stages.send(opening(1), step(1, 1, 0, 2, "last"), opening(2), closing(2), arrays=tokens(3, 4))
    assert reply.fault(0) is reply.fault(1) is reply.fault(2) is None and len(reply.arrays) == 1
    assert len(reply.notes[0]["held"]) == len(reply.notes[2]["held"]) == STAGES
    assert np.array_equal(reply.arrays[0], expected_logits([4]))
    assert [set(w.sessions) for w in stages.workers] == [{1}] * STAGES


FAULTS = [
    RuntimeError("device lost"), ValueError("x" * 1_000_000), AttributeError("typo"), AssertionError(), OSError(5, "io"),
    MemoryError(), StopIteration(), UnicodeError("\udcff"), ZeroDivisionError(), StageError("late"), KeyError(1),
]  # fmt: skip


def raising(error):
    def raise_it(*args):
        raise error

    return raise_it


@pytest.mark.parametrize("at", range(STAGES))
@pytest.mark.parametrize("error", FAULTS, ids=lambda e: type(e).__name__)
def test_whatever_a_model_raises_is_a_tombstone_that_later_stages_pass_and_others_survive(stages, at, error):
    stages.open(1, 2)
    stages.feed(2, 1, 0, 9)
    stages.workers[at].model.on_forward = raising(error)
    reply = stages.feed(1, 1, 0, 3, 4)
    fault = reply.fault(0)
    assert fault[:2] == [at, type(error).__name__] and len(fault[2]) <= 1000
    assert fault[2].encode() is not None and reply.entries[0].rows == 0 and not reply.arrays
    assert [w.sessions[1].seq for w in stages.workers] == [2] * STAGES
    assert stages.heights(1) == [2] * at + [0] * (STAGES - at)
    stages.workers[at].model.on_forward = None
    assert stages.feed(2, 2, 1, 9).fault(0) is None and stages.heights(2) == [2] * STAGES
    before = [w.device.allocated_bytes for w in stages.workers]
    planned = asking()["charges"]
    assert stages.send(closing(1)).fault(0) is None
    freed = [was - w.device.allocated_bytes for was, w in zip(before, stages.workers, strict=True)]
    assert freed == planned


def test_a_repeat_of_a_failed_step_fails_the_same_way(stages):
    stages.open(1)
    stages.feed(1, 1, 0, 3)
    stages.workers[1].model.on_forward = raising(RuntimeError("device lost"))
    first = stages.feed(1, 2, 1, 4).fault(0)
    again = stages.feed(1, 2, 1, 4)
    assert again.fault(0) == first and again.entries[0].rows == 0 and not again.arrays
    assert [w.sessions[1].seq for w in stages.workers] == [3] * STAGES


WRONG_RETURNS = {
    "float64": lambda y: y.astype(np.float64),
    "too few rows": lambda y: y[:-1],
    "flat": np.ravel,
    "a list": lambda y: y.tolist(),
    "None": lambda y: None,
}


@pytest.mark.parametrize("at", range(STAGES))
@pytest.mark.parametrize("wrong", WRONG_RETURNS.values(), ids=list(WRONG_RETURNS))
def test_what_a_lane_could_not_carry_is_a_fault_of_the_stage_whose_model_returned_it(stages, at, wrong):
    stages.open(1)
    stages.workers[at].model.on_forward = wrong
    assert stages.feed(1, 1, 0, 3, 4, logits="all").fault(0)[0] == at


def test_a_tombstone_takes_the_turn_of_its_own_session_only():
    w = worker(1)
    w.apply(frame(opening(1), opening(2)))
    fault = [0, "RuntimeError", "device lost"]
    for entry in (
        step(1, 2, 0, 0),
        step(1, 1, 3, 0),
        step(1, 1, 0, 0, epoch=2),
        step(1, 1, 0, 0)._replace(op=CLOSE),
        step(9, 1, 0, 0),
    ):
        dead = frame(entry, notes={0: {"fault": fault}})
        w.apply(dead)
        assert dead.fault(0) == fault and dead.hops == 1
    assert [s.seq for s in w.sessions.values()] == [1, 1]
    rows = np.ones((2, N_EMBD), np.float32)
    mixed = frame(step(1, 1, 0, 0), step(2, 1, 0, 2), arrays=[rows], notes={0: {"fault": fault}})
    w.apply(mixed)
    assert [s.seq for s in w.sessions.values()] == [2, 2] and mixed.notes == {0: {"fault": fault}}
    assert [w.sessions[n].cache.pos for n in (1, 2)] == [0, 2]


def test_a_tombstone_that_comes_with_rows_loses_them_and_moves_no_others(stages):
    stages.open(1, 2)
    fault = [0, "RuntimeError", "device lost"]
    dead, live = step(1, 1, 0, 2), step(2, 1, 0, 2, "all")
    reply = stages.send(dead, live, arrays=tokens(3, 4, 5, 6), notes={0: {"fault": fault}})
    assert reply.entries == [dead._replace(rows=0), live] and reply.notes == {0: {"fault": fault}}
    assert len(reply.arrays) == 1 and np.array_equal(reply.arrays[0], expected_logits([5, 6]))
    assert (stages.heights(1), stages.heights(2)) == ([0] * STAGES, [2] * STAGES)


BAD_ARGS = [
    None, [], "ctx", 8, {}, {"ctx": 8}, *({k: v for k, v in ARGS.items() if k != missing} for missing in ARGS),
    *(ARGS | {"ctx": ctx} for ctx in (0, -1, MAX_CTX + 1, 2**63, 2**64 - 1, 1.5, True, None, "8", [8], {}, b"8", float("nan"))),
    *(ARGS | {"snapshots": n} for n in (-1, MAX_SNAPSHOTS + 1, 2**60, 0.5, None, "1", [])),
    *(ARGS | {"speculate": n, "recurrent": "states"} for n in (-1, 2**60, 0.5, None, "1", [])),
    *(ARGS | {"recurrent": r} for r in ("", "Replay", None, 1, ["replay"], {}, b"replay")),
    ARGS | {"ctx": "x" * 1_000_000},
]  # fmt: skip


@pytest.mark.parametrize("args", BAD_ARGS, ids=lambda a: str(a)[:60])
def test_an_open_with_bad_arguments_faults_alone(stages, args):
    stages.open(1)
    allocated = [w.device.allocated_bytes for w in stages.workers]
    reply = stages.send(opening(2), step(1, 1, 0, 1, "last"), arrays=tokens(3), notes={0: asking(2) | {"args": args}})
    assert reply.fault(0)[:2] == [0, "InputError"] and len(reply.fault(0)[2]) <= 1000
    assert reply.notes[0]["held"] == [] and reply.fault(1) is None and stages.heights(1) == [1] * STAGES
    assert [w.device.allocated_bytes for w in stages.workers] == allocated


BAD_NOTES = [
    {},
    {"args": ARGS},
    {"held": []},
    *({k: v for k, v in asking(2).items() if k != missing} for missing in ("args", "offsets", "charges")),
    *(asking(2) | {name: bad} for name in ("offsets", "charges") for bad in (None, 7, "12", {}, [], [1], [1, 2, 3])),
    *(asking(2) | {name: [bad] * STAGES} for name in ("offsets", "charges") for bad in (-1, 2**60, None, "1", 0.5, True, [1])),
]


@pytest.mark.parametrize("note", BAD_NOTES, ids=lambda note: str(note)[:60])
def test_an_open_whose_note_lacks_something_faults_alone(stages, note):
    stages.open(1)
    allocated = [w.device.allocated_bytes for w in stages.workers]
    reply = stages.send(opening(2), step(1, 1, 0, 1), arrays=tokens(3), notes={0: dict(note)})
    assert reply.fault(0)[:2] == [0, "InputError"] and reply.fault(1) is None and stages.heights(1) == [1] * STAGES
    assert [w.device.allocated_bytes for w in stages.workers] == allocated


@pytest.mark.parametrize("off", [-256, 256])
@pytest.mark.parametrize("stage", range(STAGES))
def test_an_open_that_was_charged_something_else_than_it_takes_is_refused(stages, stage, off):
    note = asking(1)
    note["charges"][stage] += off
    reply = stages.send(opening(1), notes={0: note})
    assert reply.fault(0)[:2] == [stage, "StageError"] and "was charged" in reply.fault(0)[2]
    assert stages.workers[stage].device.allocated_bytes == 0


def test_an_open_that_fails_half_way_gives_its_slab_back(monkeypatch):
    w = worker()
    monkeypatch.setattr(StageSession, "open", raising(RuntimeError("device lost")))
    w.apply(sent := frame(opening(1)))
    assert sent.fault(0)[1:] == ["RuntimeError", "device lost"] and w.device.slab_bytes == 0


values = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
)
args = st.dictionaries(st.sampled_from([*ARGS, "more"]), values | st.integers(0, 20) | st.just("states"))
notes = st.fixed_dictionaries({}, optional={
    "args": args | st.just(ARGS) | values, "held": st.just([]) | values,
    "offsets": st.lists(st.integers(0, 1 << 20), min_size=STAGES, max_size=STAGES) | values,
    "fault": st.just([0, "RuntimeError", "device lost"]) | st.none(),
}).map(lambda note: note | {"held": []} if note.get("held") == [] else note)  # fmt: skip
small = st.integers(0, 4)
entries = st.tuples(
    st.builds(
        Entry, st.sampled_from([STEP, STEP, STEP, OPEN, OPEN, CLOSE, RESET, STOP, 9]), small, small,
        st.sampled_from([1, 1, 1, 0, 2]), small, small, st.integers(0, 3), small, st.sampled_from([0, 0, 1, 2, 9]), small,
        st.sampled_from([0, 0, 1, 2, 2**40]), st.sampled_from([0, 0, 1, 1, 2]), small, st.booleans().map(int),
        st.sampled_from([0, 0, 1, 2]),
    ),
    st.just({}) | st.builds(asking, small) | notes,
)  # fmt: skip


@given(st.lists(st.lists(entries, max_size=4), max_size=6), st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_no_sequence_of_entries_parts_the_stages_or_costs_a_live_session(frames, rows):
    """No field is negative: a lane hands out no such frame."""
    stages = Stages()
    stages.open(77)
    for seq, sent in enumerate(frames, start=1):
        own = step(77, seq, seq - 1, 1, "last")
        said = {i: note for i, (_, note) in enumerate(sent, start=1) if note}
        reply = stages.send(own, *(entry for entry, _ in sent), arrays=tokens(seq, *range(rows)), notes=said)
        assert reply.fault(0) is None and reply.entries[0] == own and np.array_equal(reply.arrays[0], expected_logits([seq]))
        assert stages.heights(77) == [seq] * STAGES
        for i, entry in enumerate(reply.entries):
            assert entry.op in (STEP, OPEN, CLOSE, RESET) or reply.fault(i) is not None
            if entry.op == OPEN and reply.fault(i) is None:
                assert reply.notes[i].get("held") is None or len(reply.notes[i]["held"]) == STAGES
        assert len({tuple((sid, s.seq, s.cache.pos) for sid, s in sorted(w.sessions.items())) for w in stages.workers}) == 1
    stages.close()
    assert all(w.device.allocated_bytes == 0 for w in stages.workers)
