"""A stage's two loops: frames pass until the end is told or shows, and either loop's end is the other's. A frame that the next
stage does not take holds up the one after the next."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from toy_stage import CFG, N_EMBD, asking, closing, expected_logits, frame, opening, step, tokens, worker

from memra_pp.errors import LaneError
from memra_pp.stage import serve
from memra_pp.stage.frames import CLOCK, OPS, PING, SPANS, STATS, STEP, STOP, TRACE, Entry, Frame
from memra_pp.stage.lanes import Lane
from memra_pp.stage.serve import question, serve_control, serve_frames
from memra_pp.stage.spans import COMPUTE, FIELDS, RECV, SEND

WAIT_S = 20.0

ALONE = (0, CFG.n_trunk)
MIDDLE = (0, 1, 2, 3)


class Served:
    """A stage whose loops run in threads; `up`, `down` and `control` are the other ends of its lanes."""

    def __init__(self, stage=0, fence=ALONE):
        self.worker = worker(stage, fence)
        self.stop = threading.Event()
        (self.up, up), (self.down, down), (self.control, control) = (lanes() for _ in range(3))
        self.inner = [up, down, control]
        self._pool = ThreadPoolExecutor(2)
        self.frames = self._pool.submit(serve_frames, self.worker, up, down, self.stop)
        self.controls = self._pool.submit(serve_control, self.worker, control, self.stop)

    def ask(self, op):
        self.control.send(question(op, 5), WAIT_S)
        answer = self.control.recv(WAIT_S)
        assert answer.id == 5 and answer.entries == [Entry(op, 0, 0, 0)]
        return answer.notes

    def close(self):
        self.stop.set()
        for lane in (self.up, self.down, self.control, *self.inner):
            lane.close()
        self._pool.shutdown()
        self.worker.close()


def lanes():
    return tuple(Lane(sock, name) for sock, name in zip(socket.socketpair(), ("the stage", "the peer"), strict=True))


@pytest.fixture
def served():
    made = Served()
    yield made
    made.close()


def test_frames_go_through_in_order(served):
    steps = [frame(step(1, n, n - 1, 1, "last"), arrays=tokens(n)) for n in range(1, 9)]
    sent = [frame(opening(1), fence=ALONE), *steps, frame(closing(1))]
    for number, one in enumerate(sent, start=1):
        one.id = number
        served.up.send(one, WAIT_S)
    for number in range(1, len(sent) + 1):
        reply = served.down.recv(WAIT_S)
        assert reply.id == number and reply.fault(0) is None and reply.hops == 1
        assert len(reply.arrays) == (reply.entries[0].op == STEP)
        if reply.arrays:
            assert (reply.arrays[0] == expected_logits([number - 1])).all()
    assert served.worker.counters.rows == 8


ROWS = 60


@pytest.fixture
def middle():
    """A stage between two others, whose model hands on the very rows it was given. Its sockets hold less than a frame."""
    made = Served(1, MIDDLE)
    made.worker.model.forward = lambda batch, x, caches: x
    made.inner[1]._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
    for session in (1, 2, 3):
        made.up.send(frame(opening(session), notes={0: asking(session, MIDDLE, ctx=ROWS)}), WAIT_S)
        assert made.down.recv(WAIT_S).fault(0) is None
    made.frames_sent = [
        frame(step(session, 1, 0, ROWS), arrays=[np.full((ROWS, N_EMBD), session, np.float32)]) for session in (1, 2, 3)
    ]
    yield made
    made.close()


def until(served, name, value):
    """The stage's counters once one of them is `value`."""
    while (stats := served.ask(STATS)[0]["answer"])[name] < value:
        pass
    return stats


def test_a_stage_goes_on_with_its_next_frame_while_the_next_stage_reads_nothing(middle):
    for one in middle.frames_sent:
        middle.up.send(one, WAIT_S)
    assert until(middle, "steps", 2)["wait_out_s"] == 0
    for one in middle.frames_sent:
        came = middle.down.recv(WAIT_S)
        assert came.id == one.id and np.array_equal(came.arrays[0], one.arrays[0])
    assert until(middle, "steps", 3)["wait_out_s"] > 0


def test_a_next_stage_that_goes_while_it_is_sent_to_ends_an_idle_stage(middle):
    middle.up.send(middle.frames_sent[0], WAIT_S)
    until(middle, "steps", 1)
    middle.down.close()
    with pytest.raises(LaneError, match="could not send to the peer"):
        middle.frames.result(WAIT_S)
    assert middle.stop.is_set()


def test_spans_are_kept_while_they_are_asked_for(served):
    sent = [frame(opening(1), fence=ALONE), *(frame(step(1, n, n - 1, 1), arrays=tokens(n)) for n in range(1, 4))]
    served.up.send(sent[0], WAIT_S)
    served.down.recv(WAIT_S)
    assert served.ask(TRACE) == {}
    before = served.ask(CLOCK)[0]["answer"]
    for one in sent[1:]:
        served.up.send(one, WAIT_S)
        served.down.recv(WAIT_S)
    after = served.ask(CLOCK)[0]["answer"]
    served.up.send(frame(closing(1)), WAIT_S)
    served.down.recv(WAIT_S)
    spans = np.frombuffer(served.ask(SPANS)[0]["answer"], np.int64).reshape(-1, len(FIELDS))
    steps = spans[np.isin(spans[:, 0], [one.id for one in sent[1:]])]
    assert before["of"] == after["of"] and steps[:, 1].tolist() == [RECV, COMPUTE, SEND] * 3
    assert (steps[:, 3] >= steps[:, 2]).all() and steps[:, 4:].tolist() == [[1, 1]] * 9
    assert before["ns"] <= steps[1, 2] and steps[-2, 3] <= after["ns"]
    assert served.ask(SPANS)[0]["answer"] == b""


def test_ping_and_stats_are_answered_while_frames_are_idle(served):
    served.up.send(frame(opening(1), fence=ALONE), WAIT_S)
    served.down.recv(WAIT_S)
    assert served.ask(PING) == {}
    stats = served.ask(STATS)[0]["answer"]
    assert stats["sessions"] == 1 and stats["allocated_bytes"] == served.worker.device.allocated_bytes > 0
    assert served.ask(len(OPS)) == {}


def test_a_control_frame_may_hold_any_number_of_entries(served):
    served.control.send(Frame(5, []), WAIT_S)
    assert served.control.recv(WAIT_S).entries == []
    served.control.send(Frame(6, [Entry(PING, 0, 0, 0), Entry(STATS, 0, 0, 0)], notes={1: {"answer": "old"}}), WAIT_S)
    reply = served.control.recv(WAIT_S)
    assert set(reply.notes) == {1} and reply.notes[1]["answer"]["stage"] == 0


def test_a_control_frame_of_the_plain_form_is_answered_too(served):
    for op in (PING, STATS):
        served.control.send(Frame(5, [Entry(op, 0, 0, 0)], tokens(1)), WAIT_S)
        assert served.control.recv(WAIT_S).notes.keys() == ({0} if op == STATS else set())


def test_stop_ends_both_loops_without_an_error(served):
    served.control.send(question(STOP, 1), WAIT_S)
    assert served.controls.result(WAIT_S) is None and served.frames.result(WAIT_S) is None


def test_the_end_of_the_drivers_control_lane_ends_both_loops(served):
    served.control.close()
    assert served.controls.result(WAIT_S) is None and served.frames.result(WAIT_S) is None


@pytest.mark.parametrize("neighbour", ["up", "down"])
def test_a_lost_neighbour_ends_the_stage_and_its_control_lane_says_so(served, neighbour):
    getattr(served, neighbour).close()
    if neighbour == "down":
        served.up.send(frame(opening(1), fence=ALONE), WAIT_S)
    with pytest.raises(LaneError):
        served.frames.result(WAIT_S)
    assert served.stop.is_set()
    with pytest.raises(LaneError):
        while True:
            served.ask(PING)


def test_junk_on_the_control_lane_ends_the_stage(served):
    served.control._sock.sendall(b"\xff" * 4096)
    assert served.controls.result(WAIT_S) is None and served.frames.result(WAIT_S) is None


def test_junk_from_upstream_ends_the_stage(served):
    served.up._sock.sendall(b"\xff" * 4096)
    with pytest.raises(LaneError, match="a frame of"):
        served.frames.result(WAIT_S)
    assert served.stop.is_set()


def test_a_silent_driver_ends_the_stage(monkeypatch):
    monkeypatch.setattr(serve, "SILENCE_S", 0.05)
    served = Served()
    try:
        assert served.controls.result(WAIT_S) is None and served.frames.result(WAIT_S) is None
        with pytest.raises(LaneError, match="closed the lane"):
            served.control.recv(WAIT_S)
    finally:
        served.close()


def test_a_fault_of_the_model_does_not_end_the_stage(served):
    served.worker.model.on_forward = lambda y: y.no_such_thing
    served.up.send(frame(opening(1), step(1, 1, 0, 1), arrays=tokens(3), fence=ALONE), WAIT_S)
    assert served.down.recv(WAIT_S).fault(1)[1] == "AttributeError"
    assert served.ask(STATS)[0]["answer"]["faults"] == 1 and not served.stop.is_set()
