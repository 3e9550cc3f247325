"""`Heart`: whoever closes its lane or falls silent is named in bounded time, once, and a question to it is an error."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from queue import Queue

import msgpack
import numpy as np
import pytest

from memra_pp.driver import heart as heart_module
from memra_pp.driver.heart import Heart
from memra_pp.errors import LaneError, StageError
from memra_pp.stage.frames import ALIGN, CLOCK, GENERAL, PING, PREFIX, STATS, STOP, Entry, Frame
from memra_pp.stage.lanes import Lane

WAIT_S = 20.0
CHILD = """
import socket, sys, threading
from types import SimpleNamespace
from memra_pp.stage.lanes import Lane
from memra_pp.stage.serve import serve_control
stage = int(sys.argv[1])
worker = SimpleNamespace(spec=f"stage {stage}", stats=lambda: {"stage": stage})
lane = Lane(socket.socket(fileno=int(sys.argv[2])), "the driver")
serve_control(worker, lane, threading.Event())
"""


class Children:
    """Stages in processes of their own, which answer on their control lanes."""

    def __init__(self, count):
        self.lanes, self.processes = [], []
        for stage in range(count):
            ours, theirs = socket.socketpair()
            args = [sys.executable, "-c", CHILD, str(stage), str(theirs.fileno())]
            self.processes.append(subprocess.Popen(args, pass_fds=[theirs.fileno()]))
            theirs.close()
            self.lanes.append(Lane(ours, f"stage {stage}"))

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()
        for lane in self.lanes:
            lane.close()


@pytest.fixture
def children():
    made = Children(3)
    yield made
    made.close()


@pytest.fixture
def deaths():
    return Queue()


@contextlib.contextmanager
def beating(lanes, on_death, silence_s=WAIT_S):
    heart = Heart(lanes, on_death, silence_s)
    try:
        yield heart
    finally:
        heart.close()
        heart.close()
        assert not heart._thread.is_alive()


@pytest.fixture
def quick(monkeypatch):
    """Ten beats a second."""
    monkeypatch.setattr(heart_module, "HEARTBEAT_S", 0.1)


def told(deaths):
    def on_death(stage, cause, silent):
        deaths.put((stage, cause))
        assert silent == ("silent" in cause)

    return on_death


def test_stages_answer_and_stop_when_the_heart_closes(children, deaths):
    with beating(children.lanes, told(deaths)) as heart:
        for _ in range(3):
            assert heart.ask(STATS, WAIT_S) == [{"stage": 0}, {"stage": 1}, {"stage": 2}]
        assert heart.ask(PING, WAIT_S) == [None] * 3
        assert not heart._asked and not heart._answers
    assert [process.wait(WAIT_S) for process in children.processes] == [0, 0, 0]
    assert deaths.empty()


def test_a_killed_stage_is_named_once_and_questions_fail_at_once(children, deaths):
    with beating(children.lanes, told(deaths)) as heart:
        heart.ask(PING, WAIT_S)
        children.processes[1].kill()
        stage, cause = deaths.get(timeout=WAIT_S)
        assert stage == 1 and "stage 1" in cause
        with pytest.raises(StageError, match="stage 1"):
            heart.ask(STATS, 10 * WAIT_S)
        assert not heart._asked and not heart._answers
        children.processes[0].kill()
        assert deaths.get(timeout=WAIT_S)[0] == 0
    assert deaths.empty()


def test_a_question_under_way_ends_with_the_heart(children, deaths):
    os.kill(children.processes[1].pid, signal.SIGSTOP)
    with beating(children.lanes, told(deaths)) as heart:
        raised = Queue()

        def ask():
            with pytest.raises(StageError, match="no answer to stats: the pipeline was closed") as error:
                heart.ask(STATS, 10 * WAIT_S)
            raised.put(error)

        thread = threading.Thread(target=ask)
        thread.start()
        while not heart._asked:
            time.sleep(0.001)
    raised.get(timeout=WAIT_S)
    thread.join(WAIT_S)
    assert not thread.is_alive() and not heart._asked


def test_a_stopped_stage_is_named_by_its_silence(children, deaths, quick):
    with beating(children.lanes, told(deaths)) as heart:
        heart.ask(PING, WAIT_S)
        os.kill(children.processes[2].pid, signal.SIGSTOP)
        heart._silence_s = 1.0
        stage, cause = deaths.get(timeout=WAIT_S)
        assert stage == 2 and "silent" in cause
        with pytest.raises(StageError, match="stage 2 is gone: silent"):
            heart.ask(STATS, 10 * WAIT_S)


def test_a_question_waits_no_longer_than_a_stage_lives(children, deaths):
    with beating(children.lanes, told(deaths)) as heart:
        heart.ask(PING, WAIT_S)
        os.kill(children.processes[1].pid, signal.SIGSTOP)
        threading.Timer(0.1, children.processes[1].kill).start()
        with pytest.raises(StageError, match="stage 1"):
            heart.ask(STATS, 10 * WAIT_S)


def test_a_question_that_is_not_answered_in_time_names_who_did_not(deaths):
    with stages_in_threads(answer, lambda lane, frame: None) as lanes, beating(lanes, told(deaths)) as heart:
        with pytest.raises(StageError, match=r"no answer to ping within 1 s from stage 1$"):
            heart.ask(PING, 0.6)
        assert not heart._asked and not heart._answers


def test_stages_of_this_machine_have_this_clock(children, deaths):
    with beating(children.lanes, told(deaths)) as heart:
        assert heart.clock_offsets(WAIT_S) == [0, 0, 0]
        assert not heart._asked and not heart._answers


def clocked(ahead, of="elsewhere"):
    """A stage of another machine, whose clock is ahead."""

    def play(lane, frame):
        clock = {"ns": time.monotonic_ns() + ahead, "of": of}
        lane.send(Frame(frame.id, frame.entries, notes={0: {"answer": clock}}), WAIT_S)

    return play


@pytest.mark.parametrize("of", ["elsewhere", None])
def test_the_clock_of_another_machine_is_told_by_its_answer(deaths, of):
    ahead = [10**15, -(10**15), 0]
    with stages_in_threads(*(clocked(ns, of) for ns in ahead)) as lanes, beating(lanes, told(deaths)) as heart:
        began = time.monotonic_ns()
        offsets = heart.clock_offsets(WAIT_S)
        took = time.monotonic_ns() - began
    assert all(abs(offset - ns) < took / heart_module.CLOCK_ROUNDS for offset, ns in zip(offsets, ahead, strict=True))


def test_of_several_answers_the_quickest_tells_the_clock(deaths, monkeypatch):
    """The others are held back, each for as long as the clock of a stage would then seem to be ahead, twice."""
    monkeypatch.setattr(heart_module, "CLOCK_ROUNDS", 3)
    calls, late = itertools.count(), 400_000_000

    def play(lane, frame):
        due = time.monotonic_ns() + (late if frame.entries[0].op == CLOCK and next(calls) != 1 else 0)
        while (now := time.monotonic_ns()) < due:
            pass
        lane.send(Frame(frame.id, frame.entries, notes={0: {"answer": {"ns": now, "of": "elsewhere"}}}), WAIT_S)

    with stages_in_threads(play) as lanes, beating(lanes, told(deaths)) as heart:
        assert abs(heart.clock_offsets(WAIT_S)[0]) < late / 2


@pytest.mark.parametrize("answer", [None, 7, "now", [], {}, {"ns": 1.0}, {"ns": True}, {"ns": None, "of": "here"}], ids=str)
def test_what_is_no_clock_is_an_error_that_names_the_stage(answer, deaths):
    with (
        stages_in_threads(noted({0: {"answer": answer}})) as lanes,
        beating(lanes, told(deaths)) as heart,
        pytest.raises(StageError, match=r"stage 0 gave .* for its clock"),
    ):
        heart.clock_offsets(WAIT_S)


@contextlib.contextmanager
def stages_in_threads(*plays):
    """Stages played by functions of a lane and the frame that came on it."""
    pairs = [socket.socketpair() for _ in plays]
    ours = [Lane(a, f"stage {stage}") for stage, (a, _) in enumerate(pairs)]
    theirs = [Lane(b, "the driver") for _, b in pairs]
    threads = [threading.Thread(target=play_until_closed, args=pair) for pair in zip(theirs, plays, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield ours
    finally:
        for lane in (*ours, *theirs):
            lane.close()
        for thread in threads:
            thread.join()


def play_until_closed(lane, play):
    with contextlib.suppress(LaneError):
        while True:
            if (frame := lane.recv(WAIT_S)) is not None:
                play(lane, frame)


def answered(frame):
    return Frame(frame.id, frame.entries, notes={i: {"answer": entry.op} for i, entry in enumerate(frame.entries)})


def answer(lane, frame):
    lane.send(answered(frame), WAIT_S)


def junk(lane, frame):
    with contextlib.suppress(OSError):
        lane._sock.sendall(b"\xff" * 4096)


def hollow(lane, frame):
    lane.send(Frame(frame.id, []), WAIT_S)


def unanswered(lane, frame):
    lane.send(frame, WAIT_S)


def noted(*notes):
    """Answers with notes of each kind in turn."""
    kinds = itertools.cycle(notes)

    def play(lane, frame):
        lane.send(Frame(frame.id, [*frame.entries, Entry(STOP, 9, 9, 9)], notes=next(kinds)), WAIT_S)

    return play


def laden(lane, frame):
    """One entry with one array: of the form that a step has."""
    lane.send(Frame(frame.id, frame.entries, [np.ones(3, np.float32)]), WAIT_S)


def stray(lane, frame):
    for other in (0, frame.id + 1000):
        lane.send(Frame(other, frame.entries), WAIT_S)
    answer(lane, frame)


ODD_NOTES = noted({0: {}}, {1: {"answer": 1}}, {0: {"answer": None}}, {0: {"answer": [{}]}}, {0: {"fault": [0, "A", "b"]}}, {})


@pytest.mark.parametrize("play", [hollow, unanswered, stray, ODD_NOTES, laden])
def test_odd_answers_do_not_stop_the_heart(play, deaths, quick):
    with stages_in_threads(play, answer) as lanes, beating(lanes, told(deaths)) as heart:
        assert heart.ask(STATS, WAIT_S)[1] == STATS
        assert len([heart.ask(PING, WAIT_S) for _ in range(12)]) == 12 and deaths.empty()
        lanes[1]._sock.shutdown(socket.SHUT_RDWR)
        assert deaths.get(timeout=WAIT_S)[0] == 1 and heart._thread.is_alive()


def misnoted(notes):
    """Answers whose notes are what no map of entries to maps is."""

    def play(lane, frame):
        packed = msgpack.packb(notes)
        rest = struct.pack(f"<3I{len(Entry._fields)}q", 1, 0, len(packed), *frame.entries[0]) + packed
        size = PREFIX.size + len(rest)
        with contextlib.suppress(OSError):
            lane._sock.sendall(
                PREFIX.pack(GENERAL, size + -size % ALIGN, 0, 0, 0, 0, 0, frame.id) + rest + bytes(-size % ALIGN)
            )

    return play


MISNOTED = [misnoted(notes) for notes in (None, 7, [], {0: None}, {0: []}, {1: {}}, {"0": {}}, {0: {"fault": "x"}})]


@pytest.mark.parametrize("play", [junk, *MISNOTED])
def test_junk_is_a_death(play, deaths):
    with stages_in_threads(play, answer) as lanes, beating(lanes, told(deaths)):
        assert deaths.get(timeout=WAIT_S)[0] == 0


def test_answers_that_come_together_are_all_heard(deaths):
    """What came behind a frame in the same packet is no longer in the socket: no selector tells of it."""
    held = []

    def two_at_once_and_never_again(lane, frame):
        held.append(answered(frame))
        if len(held) == 2:
            packet = []
            for one in held:
                Lane(Capture(packet), "nobody").send(one, WAIT_S)
            lane._sock.sendall(b"".join(packet))

    with stages_in_threads(two_at_once_and_never_again) as lanes, beating(lanes, told(deaths)) as heart:
        assert heart.ask(STATS, 3.0) == [STATS]


class Capture:
    """A socket that keeps what is sent."""

    def __init__(self, buffers):
        self.buffers = buffers

    def send(self, buffer, flags):
        return self.sendmsg([buffer], (), flags)

    def sendmsg(self, buffers, ancillary, flags):
        self.buffers += [bytes(b) for b in buffers]
        return sum(map(len, buffers))

    def settimeout(self, timeout):
        pass

    def setsockopt(self, *option):
        pass


def test_a_death_notice_that_raises_does_not_stop_the_heart(deaths):
    def on_death(stage, cause, silent):
        deaths.put((stage, cause))
        raise RuntimeError("the callback failed")

    with stages_in_threads(answer, answer) as lanes, beating(lanes, on_death):
        for stage in (0, 1):
            lanes[stage]._sock.shutdown(socket.SHUT_RDWR)
            assert deaths.get(timeout=WAIT_S)[0] == stage


def test_time_in_which_the_driver_itself_was_stopped_is_nobodys_silence(deaths, monkeypatch):
    """A clock that leaps an hour between any two looks, as for a process stopped and continued again and again."""
    leaps = itertools.count(0, 3600)
    monkeypatch.setattr(heart_module.time, "monotonic", lambda: float(next(leaps)))
    beats = threading.Semaphore(0)

    def counted(lane, frame):
        answer(lane, frame)
        beats.release()

    with stages_in_threads(counted) as lanes, beating(lanes, told(deaths), 60.0):
        for _ in range(20):
            assert beats.acquire(timeout=WAIT_S)
    assert deaths.empty()
