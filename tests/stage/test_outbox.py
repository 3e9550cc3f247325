"""`Outbox`: frames leave in order, a neighbour that reads late holds up the frame after the next, and no failure is lost."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from memra_pp.errors import FrameError, LaneError
from memra_pp.stage import outbox as outbox_module
from memra_pp.stage.frames import STEP, Entry, Frame
from memra_pp.stage.lanes import Lane
from memra_pp.stage.outbox import Outbox
from memra_pp.stage.spans import FIELDS, SEND, Spans

WAIT_S = 20.0
LARGE = 1 << 20


class Ends:
    """An outbox, its stage's time, and the neighbour's end."""

    def __init__(self):
        ours, theirs = socket.socketpair()
        self.lane, self.peer, self.spans = Lane(ours, "the neighbour"), Lane(theirs, "the stage"), Spans(2)
        self.out = Outbox(self.lane, self.spans)

    def close(self):
        self.lane.close()
        self.peer.close()
        self.out.close()
        assert not [t for t in threading.enumerate() if t.name.startswith("outbox")]


@pytest.fixture
def ends():
    made = Ends()
    yield made
    made.close()


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as made:
        yield made


def frame(number, rows):
    return Frame(number, [Entry(STEP, 1, number, 1, 0, rows)], [np.full(rows, number, np.float32)])


def came(peer, number, rows):
    reply = peer.recv(WAIT_S)
    assert reply.id == number and np.array_equal(reply.arrays[0], np.full(rows, number, np.float32))


def test_what_fits_is_sent_at_once_without_a_thread(ends):
    for number in range(1, 4):
        assert ends.out.send(frame(number, 100))
        came(ends.peer, number, 100)
    assert ends.out._sending is None and ends.spans.wait_out == 0


def test_a_neighbour_that_reads_late_holds_up_the_next_frame_only(ends, pool):
    ends.spans.trace()
    assert not ends.out.send(frame(1, LARGE))
    second = pool.submit(ends.out.send, frame(2, 10))
    assert ends.peer._sock.recv(1, socket.MSG_PEEK) and not second.done()
    came(ends.peer, 1, LARGE)
    assert second.result(WAIT_S)
    came(ends.peer, 2, 10)
    assert ends.spans.wait_out > 0
    kept = np.frombuffer(ends.spans.take(), np.int64).reshape(-1, len(FIELDS))
    assert kept[kept[:, 1] == SEND][:, 0].tolist() == [1, 2]


def test_frames_of_all_sizes_leave_in_order(ends, pool):
    sizes = [LARGE, 10, LARGE, LARGE // 2, 1, 100_000, LARGE]
    sending = pool.submit(lambda: [ends.out.send(frame(n, size)) for n, size in enumerate(sizes)])
    for n, size in enumerate(sizes):
        came(ends.peer, n, size)
    assert len(sending.result(WAIT_S)) == len(sizes)


def failed(out):
    """Waits until the thread has failed."""
    with pytest.raises(LaneError):
        out._sending.result(WAIT_S)


@pytest.mark.parametrize("then", [lambda out: out.send(frame(2, 1)), Outbox.check], ids=["send", "check"])
def test_a_neighbour_that_goes_while_it_is_sent_to_fails_what_comes_next(ends, then):
    assert not ends.out.send(frame(1, LARGE))
    ends.out.check()
    ends.peer.close()
    failed(ends.out)
    for _ in range(2):
        with pytest.raises(LaneError, match="could not send to the neighbour"):
            then(ends.out)


def test_a_neighbour_that_takes_nothing_fails_what_comes_next(ends, monkeypatch):
    monkeypatch.setattr(outbox_module, "SEND_S", 0.05)
    assert not ends.out.send(frame(1, LARGE))
    with pytest.raises(LaneError, match="it has stopped taking part"):
        ends.out.send(frame(2, 1))


def test_a_frame_that_cannot_travel_is_refused_and_another_may_be_sent_in_its_place(ends, pool):
    assert not ends.out.send(frame(1, LARGE))
    reading = pool.submit(came, ends.peer, 1, LARGE)
    for bad in (np.zeros(LARGE), np.zeros((LARGE, 2), np.float32)[:, 0]):
        with pytest.raises(FrameError):
            ends.out.send(Frame(2, [Entry(STEP, 1, 2, 1, 0, 1)], [bad]))
    reading.result(WAIT_S)
    assert ends.out.send(frame(2, 1))
    came(ends.peer, 2, 1)


def test_closing_waits_for_what_is_being_sent(ends, pool):
    assert not ends.out.send(frame(1, LARGE))
    closing = pool.submit(ends.out.close)
    came(ends.peer, 1, LARGE)
    assert closing.result(WAIT_S) is None
